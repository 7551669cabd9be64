"""Configuration of the scheduler process; the numbers of its core are in ``core.settings``."""

from contracts import sealed
from contracts.keys import Peppers
from contracts.service.config import Count, Positive, Secret, ServiceConfig


class SchedulerConfig(ServiceConfig, frozen=True, kw_only=True):
    """``HEADRACE_<NAME>`` sets a field; spans are seconds."""

    pepper: Secret
    """The gateways' (contracts.keys): the admin service judges keys itself."""
    lost_after_s: float = 3.0
    """Silence after which a worker or stream owner is lost."""
    given_up_after_s: Positive = 30.0
    """What is alive, but whose event loop stands still for so long, counts as silent from then on."""
    lease_ttl_s: Count = 2
    """How long a model stays without owner when its owner dies; whole seconds, the bus knows no finer ones."""
    lease_renew_s: float = 0.5
    """A quarter of the lease, so that three renewals may fail."""
    heartbeat_s: float = 0.5
    """Period of the loopback heartbeats, the same as that of workers and stream owners."""
    body_cache_bytes: int = 64 * 1024 * 1024
    """Bodies of queued requests kept in memory, per model; the others are read again at dispatch."""

    quarantine_public_key: str = ""
    """Quarantined requests' bodies are kept sealed for it (``headrace quarantine keys``); empty: they are not kept."""

    def problems(self) -> list[str]:
        """What is wrong between values, a line each."""
        wrong = super().problems()
        try:
            Peppers.parse(self.pepper)
        except ValueError as error:
            wrong.append(f"HEADRACE_PEPPER: {error}")
        if self.lease_renew_s * 2 > self.lease_ttl_s:
            wrong.append("HEADRACE_LEASE_RENEW_S must be at most half of HEADRACE_LEASE_TTL_S")
        if self.lost_after_s < 2 * self.heartbeat_s:
            wrong.append("HEADRACE_LOST_AFTER_S must be at least two heartbeats (HEADRACE_HEARTBEAT_S)")
        try:
            if self.quarantine_public_key:
                sealed.seal(b"", self.quarantine_public_key)
        except sealed.BadKey as error:
            wrong.append(f"HEADRACE_QUARANTINE_PUBLIC_KEY is {error}")
        return wrong
