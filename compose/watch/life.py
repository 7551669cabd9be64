"""The life of one request as steps, made of what is told of it in whatever order; pure.

Times are the owner's, of what it or an attempt's event says. What only heartbeats tell of has the time at which it was
``seen``, up to half a second late. No step names a prompt or an output.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

from contracts.messages.attempts import AttemptEvent
from contracts.messages.control import Progress, WorkerHeartbeat
from contracts.messages.request import RequestEnvelope, WorkItem
from contracts.messages.usage import RequestTimes

What = Literal[
    "admitted", "queued", "dispatched", "prefill", "first_token", "decoding", "attempt_ended", "retry", "relayed",
    "ended", "out_of_sight",
]  # fmt: skip
DECODING_EVERY_MS = 1_000
"""At most so often the progress of generating is told."""
_LAST = ("completed", "cancelled", "expired")
"""Outcomes after which nothing follows, whatever the request; of the others its owner knows."""

Facts = dict[str, str | int | float | bool | None]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened, as a line of JSON."""

    request_id: str
    what: What
    at_ms: int
    after_ms: int | None
    """Since its admission; None where that is not known."""
    attempt: int = 0
    seen: bool = False
    """The time is when it was seen, not when it was."""
    facts: Facts = {}


class Life:
    """``ended`` once no attempt follows. Each method gives the steps that are new."""

    def __init__(self) -> None:
        self.request_id = self.model = self.tenant = ""
        """Empty until something is known of it."""
        self.stream_owner = ""
        self.events: dict[int, AttemptEvent] = {}
        """Ends, by attempt."""
        self.ended = False
        self._admitted_at_ms = 0
        self._told: set[tuple[What, int]] = set()
        self._tokens: dict[int, tuple[int, int]] = {}
        """By attempt: how many were told of last, and when."""

    def queued(self, envelope: RequestEnvelope, stored_at_ms: int) -> Iterator[Step]:
        """REQUESTS holds it."""
        yield from self._admitted(envelope, envelope.version, stored_at_ms)

    def dispatched(self, item: WorkItem) -> Iterator[Step]:
        """WORK holds an attempt."""
        yield from self._admitted(item.request, item.request.version or item.version)
        yield from self._dispatched(item.attempt, item.dispatched_at_ms, item.worker, item.version)

    def progressed(self, beat: WorkerHeartbeat, now_ms: int) -> Iterator[Step]:
        """A worker tells what it has in flight."""
        for each in beat.in_flight:
            if each.request_id == self.request_id and each.attempt not in self.events:
                yield from self._progressed(each, beat.worker, now_ms)

    def _progressed(self, told: Progress, worker: str, now_ms: int) -> Iterator[Step]:
        number, tokens = told.attempt, told.completion_tokens
        last = self._tokens.get(number)
        if last is None and not tokens:
            yield from self._once("prefill", number, now_ms, {"worker": worker}, seen=True)
        elif last is not None and tokens and not last[0]:
            yield from self._first_token(told, now_ms, seen=True)
        elif last is None:  # It has been generating for longer: its end will say since when.
            yield self._step("decoding", number, now_ms, {"completion_tokens": tokens}, seen=True)
        elif tokens > last[0] and now_ms - last[1] >= DECODING_EVERY_MS:
            rate = round((tokens - last[0]) * 1000 / (now_ms - last[1]), 1)
            facts: Facts = {"completion_tokens": tokens, "tokens_per_s": rate}
            yield self._step("decoding", number, now_ms, facts, seen=True)
        else:
            return
        self._tokens[number] = tokens, now_ms

    def attempt_ended(self, event: AttemptEvent) -> Iterator[Step]:
        """ATTEMPTS or the ledger holds its end. Attempt 0: it was never dispatched."""
        number, first_token_at_ms = event.attempt, event.first_token_at_ms
        if number in self.events:
            return
        if event.admitted_at_ms:
            yield from self._admitted(event, event.version)
        if event.dispatched_at_ms:
            yield from self._dispatched(number, event.dispatched_at_ms, event.worker, event.version)
        self.events[number] = event
        self.ended = self.ended or event.outcome in _LAST
        if event.started_at_ms:
            yield from self._once("prefill", number, event.started_at_ms, {"worker": event.worker})
        if first_token_at_ms:
            yield from self._first_token(event, first_token_at_ms, seen=False)
        facts: Facts = {
            "outcome": event.outcome,
            "code": event.error_code,
            "reason": event.error_message,
            "finish_reason": event.finish_reason,
            "completion_tokens": event.completion_tokens,
            "first_token_after_ms": max(0, first_token_at_ms - event.admitted_at_ms) if first_token_at_ms else None,
            "worker": event.worker,
            "reporter": event.reporter,
            "billable": event.billable,
        }
        yield self._step("attempt_ended", number, event.ended_at_ms, facts)

    def told_ended(self) -> None:
        """Its owner says that no attempt follows."""
        self.ended = True

    def finish(self, times: RequestTimes, now_ms: int) -> Iterator[Step]:
        """Nothing more is awaited; ``times``: where its time went, as far as is known."""
        self.request_id = self.request_id or times.request_id
        last = self.events[max(self.events)] if self.events else None
        at_ms = last.ended_at_ms if last else now_ms
        spans = {phase.name: phase.ms for phase in times.phases}
        if last is not None and spans["relay"] is not None:
            facts: Facts = {f"{name}_ms": spans[name] for name in ("edge", "admission", "relay", "caller")}
            at_ms += round(spans["relay"])
            yield self._step("relayed", times.attempts, at_ms, facts)
        facts = {
            "outcome": times.outcome,
            "code": times.code,
            "total_ms": times.total_ms,
            "first_token_ms": times.first_token_ms,
            "why": times.why,
        }
        yield self._step("ended", times.attempts, at_ms, facts)

    def lost_sight(self, now_ms: int) -> Step:
        """Nobody tells of it any more."""
        return self._step("out_of_sight", 0, now_ms, {}, seen=True)

    def _admitted(self, request: RequestEnvelope | AttemptEvent, version: str, stored_at_ms: int = 0) -> Iterator[Step]:
        if isinstance(request, RequestEnvelope):
            self.stream_owner = request.stream_owner
        self.request_id, self.model, self.tenant = request.request_id, request.model, request.tenant
        self._admitted_at_ms = request.admitted_at_ms
        facts: Facts = {
            "tenant": request.tenant,
            "key_id": request.key_id,
            "model": request.model,
            "version": version,
            "arm": request.arm,
            "endpoint": request.endpoint,
            "priority": request.priority,
            "stream": request.stream,
            "prompt_tokens": request.prompt_tokens,
            "client_request_id": request.client_request_id,
            "choice_reason": request.choice_reason,
        }
        yield from self._once("admitted", 0, request.admitted_at_ms, facts)
        yield from self._once("queued", 0, stored_at_ms or request.admitted_at_ms, {})

    def _dispatched(self, number: int, at_ms: int, worker: str, version: str) -> Iterator[Step]:
        before = self.events.get(number - 1)
        since_ms = before.ended_at_ms if before else self._admitted_at_ms
        if number > 1:
            yield from self._once("retry", number, since_ms, {})
        facts: Facts = {"worker": worker, "version": version, "waited_ms": max(0, at_ms - since_ms)}
        yield from self._once("dispatched", number, at_ms, facts)

    def _first_token(self, told: Progress | AttemptEvent, at_ms: int, *, seen: bool) -> Iterator[Step]:
        facts: Facts = {"prompt_tokens": told.prompt_tokens, "cached_tokens": told.cached_tokens}
        yield from self._once("first_token", told.attempt, at_ms, facts, seen=seen)

    def _once(self, what: What, number: int, at_ms: int, facts: Facts, *, seen: bool = False) -> Iterator[Step]:
        if (what, number) not in self._told:
            self._told.add((what, number))
            yield self._step(what, number, at_ms, facts, seen=seen)

    def _step(self, what: What, number: int, at_ms: int, facts: Facts, *, seen: bool = False) -> Step:
        after_ms = max(0, at_ms - self._admitted_at_ms) if self._admitted_at_ms else None
        return Step(
            request_id=self.request_id,
            what=what,
            at_ms=at_ms,
            after_ms=after_ms,
            attempt=number,
            seen=seen,
            facts=facts,
        )
