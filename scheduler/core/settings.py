"""Numbers of the scheduler's core."""

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All spans are milliseconds."""

    publish_within_ms: int = 10_000
    """From admission until REQUESTS must hold the request: twice the gateway's publish time limit."""
    expiry_margin_ms: int = 2_000
    """A reservation expires this long after publish_by, so that a message stored in time is never refused."""
    lost_after_beats: int = 6
    """Loopback heartbeats (500 ms apart) of silence until a worker or stream owner is lost: 3 s."""
    slow_lag_ms: int = 500
    """A worker whose event loop is later than this is slow: nothing more is placed there. Where it stops to pull."""
    slow_engine_ms: int = 10_000
    """So is one whose engine makes no step for so long though it has work: the longest step measured takes seconds."""
    given_up_ms: int = 30_000
    """A sign of life from a process whose event loop stands still for so long counts for nothing."""
    cancel_repeat_ms: int = 1_000
    ageing_ms: int = 30_000
    """A batch request that waited this long goes with the interactive ones: half the default deadline."""
    pickup_timeout_ms: int = 15_000
    """An attempt in WORK that its worker, heard and ready, does not have in flight by then is given to another.
    It happens only when something was lost on the way; a worker pulls within milliseconds."""
    clearing_ms_max: int = 10_000
    """How long a stream owner that sends no heartbeats may take to say that its caller has seen nothing."""
    end_overdue_ms: int = 2_000
    """An attempt that its worker no longer has, and of which no end was told for so long, is looked up in ATTEMPTS:
    an end follows its storage within milliseconds."""
    readers_heard_ms: int = 10_000
    """So long after an owner took in a request of an earlier one nobody's leave is taken for the last reader's: who
    joined it says so again every second."""
    removed_quiet_ms: int = 5_000
    """A removed model keeps its owner this long after its last request: who missed the end asks within seconds."""
    starvation_timeout_ms: int = 5_000
    """How long a request that fits no worker may be passed by smaller ones."""
