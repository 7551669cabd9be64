"""Configuration of a gateway process."""

from typing import Annotated

from msgspec import Meta

from contracts.keys import Peppers
from contracts.service.config import Count, Positive, Secret, ServiceConfig


class GatewayConfig(ServiceConfig, frozen=True, kw_only=True):
    """Read from ``HEADRACE_*`` variables; see contracts.service.config.ServiceConfig for what all services share."""

    pepper: Secret
    """What keys the HMAC of API keys; on a second line the one before it (contracts.keys)."""
    listen: tuple[str, ...] = ("127.0.0.1:8080",)
    """Addresses as JSON list of host:port; gateways on one host may share one (SO_REUSEPORT)."""
    admin_listen: tuple[str, ...] = ("127.0.0.1:8081",)
    """Addresses of the admin API, which is served nowhere else; none: not by this gateway."""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    connections_max: Count = 4096
    """Open connections of callers, at each of both addresses: each may cost 100 KB."""
    connections_per_address_max: Count = 2048
    """Of one client's address; raise it when a proxy in front is the only client."""
    cache: str = ""
    """Where files of tokenizers are kept; empty: $XDG_CACHE_HOME/headrace, else ~/.cache/headrace."""
    cors_origins: tuple[str, ...] = ("*",)
    """Origins whose pages may call the API; ``*`` is all: a key in a header, not a cookie, authenticates."""
    grace_s: Annotated[float, Meta(ge=0)] = 25.0
    """After SIGTERM running streams have so long; below the 30 s that Kubernetes and docker compose files give."""
    body_bytes_max: Count = 16 << 20
    """Largest request body, after decompression: a prompt of 1M tokens has about 5 MB."""
    shed_lag_s: Positive = 0.1
    """While its event loop is later than this, and until it is less than half as late, a gateway takes nothing new: a
    reader of tokens that come each 20 to 50 ms would see it. One that had nothing to do was 0.02 s late at worst beside
    ten busy processes for each core (measured)."""
    body_s_max: Positive = 30.0
    """A body that takes longer to arrive is refused with 408. A guess: 16 MiB at 4.5 Mbit/s."""
    claim_check_bytes: int = 64 << 10
    """Larger bodies travel by the object store."""
    admit_s_max: Positive = 5.0
    """How long a request waits for a scheduler to answer: a standby takes over within seconds."""
    hold_s: Annotated[float, Meta(gt=0, le=15)] = 10.0
    """The status line waits so long for the first frame (ARCHITECTURE.md, The edge); idle proxies wait no longer."""
    stream_bytes_max: Count = 4 << 20
    """Unsent text per stream; a slower reader is cut off."""

    stack_run: str = ""
    """The run.json of a stack on this machine: ``/metrics/stack`` has the metrics of all its processes."""

    def problems(self) -> list[str]:
        wrong = super().problems()
        try:
            Peppers.parse(self.pepper)
        except ValueError as error:
            wrong.append(f"HEADRACE_PEPPER: {error}")
        if not self.listen:
            wrong.append("HEADRACE_LISTEN names no address")
        for variable, addresses in (("HEADRACE_LISTEN", self.listen), ("HEADRACE_ADMIN_LISTEN", self.admin_listen)):
            for address in addresses:
                host, _, port = address.rpartition(":")
                if not host or not port.isdecimal() or int(port) > 65535:
                    wrong.append(f"{variable}: {address!r} is not host:port")
        if bool(self.tls_cert_file) != bool(self.tls_key_file):
            wrong.append("HEADRACE_TLS_CERT_FILE and HEADRACE_TLS_KEY_FILE: one without the other")
        return wrong
