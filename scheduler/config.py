"""Configuration of the scheduler process, and the numbers of its core."""

import msgspec

from contracts.service.config import ServiceConfig


class SchedulerConfig(ServiceConfig, frozen=True, kw_only=True):
    lost_after_s: float = 3.0
    """Silence after which a worker or stream owner is lost (DESIGN.md section 7)."""
    lease_ttl_s: int = 2
    """How long a model stays without owner when its owner dies; whole seconds, the bus knows no finer ones."""
    lease_renew_s: float = 0.5
    """A quarter of the lease, so that three renewals may fail."""
    tick_s: float = 0.5
    """Period of our own ticks, the same as that of heartbeats."""
    body_cache_bytes: int = 64 * 1024 * 1024
    """Bodies of queued requests kept in memory, per model; the others are read again at dispatch."""

    def problems(self) -> list[str]:
        wrong = []
        if self.lease_ttl_s < 1:
            wrong.append("HEADRACE_LEASE_TTL_S must be 1 or more")
        if self.lease_renew_s * 2 > self.lease_ttl_s:
            wrong.append("HEADRACE_LEASE_RENEW_S must be at most half of HEADRACE_LEASE_TTL_S")
        if self.lost_after_s < 2 * self.tick_s:
            wrong.append("HEADRACE_LOST_AFTER_S must be at least two ticks (HEADRACE_TICK_S)")
        return wrong


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of the core. All spans are milliseconds."""

    publish_within_ms: int = 10_000
    """From admission until REQUESTS must hold the request: twice the gateway's publish time limit."""
    lapse_margin_ms: int = 2_000
    """A reservation lapses this long after publish_by, so that a message stored in time is never refused."""
    lost_ticks: int = 6
    """Own ticks (500 ms apart) of silence until a worker or stream owner is lost: 3 s (DESIGN.md section 7)."""
    cancel_repeat_ms: int = 1_000
    ageing_ms: int = 30_000
    """A batch request that waited this long stands with the interactive ones: half the default deadline."""
    unheld_ms: int = 15_000
    """An attempt in WORK that its worker, heard and ready, does not hold for this long is withdrawn and given anew.
    It happens only when something was lost on the way; a worker pulls within milliseconds."""
    patience_ms: int = 5_000
    """How long a request that fits no worker may be passed by smaller ones."""
