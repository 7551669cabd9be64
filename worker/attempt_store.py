"""The end of an attempt is decided once: the first terminal event stored on its subject wins."""

import asyncio

import msgspec
import structlog

from contracts import subjects, topology
from contracts.bus import Bus, BusError, Unconfirmed, WrongSequence
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Codec

RETRY_S, RETRY_S_MAX = 0.1, 2.0

_LOGGED = (
    *("request_id", "attempt", "tenant", "model", "version", "worker", "endpoint", "priority", "stream", "outcome"),
    *("finish_reason", "error_code", "retryable", "engine_death", "billable", "prompt_tokens", "cached_tokens"),
    *("completion_tokens", "reasoning_tokens", "last_seq"),
)
"""Fields of the event that its log line has."""

_log = structlog.get_logger()
_event: Codec[AttemptEvent] = Codec(AttemptEvent)


async def store(bus: Bus, event: AttemptEvent) -> bool:
    """Store ``event`` unless another one is; whether it is the stored one. Tries until that is known."""
    data, pause = _event.encode(event), RETRY_S
    while (won := await _try_once(bus, event, data)) is None:
        await asyncio.sleep(pause)
        pause = min(2 * pause, RETRY_S_MAX)
    return won


async def _try_once(bus: Bus, event: AttemptEvent, data: bytes) -> bool | None:
    subject = subjects.attempt(event.model, event.request_id, event.attempt)
    # The writer's name is part of the id: two writers of one attempt must not pass for one.
    message_id = f"{event.request_id}.{event.attempt}.{event.worker}"
    try:
        try:
            await bus.jetstream.store(subject, data, msg_id=message_id, expect_last=0)
            return True
        except (WrongSequence, Unconfirmed):
            last = await bus.jetstream.last(topology.ATTEMPTS, subject)
    except BusError as error:
        _log.warning("event_not_stored", request_id=event.request_id, attempt=event.attempt, reason=repr(error))
        return None
    if last is None:
        return None
    try:
        stored = _event.decode(last.data)
    except msgspec.MsgspecError as error:
        _log.error("event_undecodable", subject=subject, seq=last.stream_seq, reason=str(error))
        return False
    return (stored.reporter, stored.worker, stored.outcome) == (event.reporter, event.worker, event.outcome)


def log(event: AttemptEvent, *, won: bool) -> None:
    """One line for each attempt; ``won``: this event is the stored one."""
    _log.info(
        "attempt_ended",
        won=won,
        dispatched_after_ms=event.dispatched_at_ms - event.admitted_at_ms,
        first_token_after_ms=event.first_token_at_ms and event.first_token_at_ms - event.dispatched_at_ms,
        ended_after_ms=event.ended_at_ms - event.dispatched_at_ms,
        **{name: getattr(event, name) for name in _LOGGED},
    )
