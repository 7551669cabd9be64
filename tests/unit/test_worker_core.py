"""The worker's decisions: every rule once, then histories at random with the rules checked at every step."""

import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.messages.base import Epoch
from contracts.messages.control import (
    SERVICE_FAULTS,
    Announce,
    CancelAttempt,
    ControlRequest,
    Evict,
    Hold,
    SwitchVersion,
)
from contracts.messages.frames import EndData, ErrorData
from contracts.messages.request import Reply, RequestEnvelope, WorkItem
from worker.core import attempts, outcomes
from worker.core.core import BrokenLifecycle, WorkerCore
from worker.core.events import (
    AckWork,
    AnswerControl,
    AttemptEnded,
    CloseStream,
    ControlAsked,
    DrainKnown,
    DrainStarted,
    Effect,
    Event,
    EventStored,
    FetchVersion,
    GraceEnded,
    Joined,
    Key,
    LeaveWork,
    LoadVersion,
    RebuildEngine,
    Rejoin,
    SendHeartbeat,
    StartAttempt,
    StopAttempt,
    StoreEvent,
    VersionFetched,
    VersionRefused,
    WorkPulled,
)
from worker.engines.base import (
    Counts,
    EngineEvent,
    EngineFailure,
    EngineLost,
    EngineRefused,
    EngineSampled,
    EngineStarted,
    EngineStats,
)

NOW = 1_700_000_000_000
"""By the clock of the scheduler."""
PULLED = 5_000
"""By the worker's own, at each step that says nothing else."""
DEAD = EngineFailure("engine_error", "died", retryable=True, engine_death=True)


def item(
    request_id: str = "r1",
    attempt: int = 1,
    *,
    epoch: int = 1,
    prompt: int = 10,
    output: int = 10,
    choices: int = 1,
    stream: bool = True,
    **fields: Any,
) -> WorkItem:
    request = RequestEnvelope(
        request_id=request_id,
        tenant="t",
        key_id="k",
        model="m",
        endpoint="chat/completions",
        stream=stream,
        prompt_tokens=prompt,
        max_output_tokens=output,
        choices=choices,
        priority="interactive",
        admitted_at_ms=NOW - 20,
        publish_within_ms=1000,
        deadline_ms=60_000,
        reply=Reply(subject="reply.v1._gw.g", stream=request_id),
        client_request_id="c-1",
        **fields,
    )
    return WorkItem(
        epoch=Epoch(1, epoch), attempt=attempt, version="v1", worker="w-1", dispatched_at_ms=NOW - 10, request=request
    )


class World:
    """A core with a shell that obeys it, and what both have done so far."""

    def __init__(self, *, slots: int = 2, kv_tokens: int = 1000, ready: bool = True, **options: Any) -> None:
        self.core = WorkerCore(**options)
        self.names = 0
        self.delivery = 0
        self.pulled: list[Key] = []
        self.runs: dict[Key, Counts] = {}
        self.stopping: set[Key] = set()
        self.storing: dict[Key, StoreEvent] = {}
        self.unacknowledged: set[int] = set()
        self.started: Counter[Key] = Counter()
        self.stored: Counter[Key] = Counter()
        self.answers: dict[int, str] = {}
        self.refused: dict[Key, Epoch] = {}
        self.evicted: set[Key] = set()
        self.cancels: dict[int, Key] = {}
        self.step(Joined(worker="w-1"))
        if ready:
            self.step(EngineStarted(slots=slots, kv_tokens=kv_tokens))

    def step(self, event: Event | EngineEvent, now_ms: int = PULLED) -> list[Effect]:
        effects = self.core.step(event, now_ms)
        for effect in effects:
            self.perform(effect)
        assert not list(self.core.violations())
        assert len(self.core.attempts) <= len(self.pulled)
        return effects

    def perform(self, effect: Effect) -> None:
        match effect:
            case StartAttempt():
                self.started[effect.key] += 1
                assert self.started[effect.key] == 1, "started twice"
                until = self.refused.get(effect.key)
                assert until is None or effect.item.epoch > until, "started after the answer to a cancel"
                assert effect.key not in self.stored, "started after its end"
                self.runs[effect.key] = effect.counts
            case StopAttempt():
                assert effect.key in self.runs
                self.stopping.add(effect.key)
            case StoreEvent():
                self.stored[effect.key] += 1
                assert self.stored[effect.key] == 1, "decided twice"
                assert effect.key not in self.runs, "decided while it runs"
                self.storing[effect.key] = effect
            case AckWork() | LeaveWork():
                assert effect.delivery in self.unacknowledged, "given up twice"
                self.unacknowledged.remove(effect.delivery)
            case AnswerControl():
                assert effect.asker not in self.answers, "answered twice"
                self.answers[effect.asker] = effect.answer.status
                if (key := self.cancels.get(effect.asker)) and effect.answer.status != "stale":
                    assert key not in self.runs
                    assert key not in self.storing
                    self.refused[key] = effect.answer.epoch
            case Rejoin():
                self.evicted |= self.runs.keys() | self.storing.keys() | set(self.pulled)
                self.runs.clear()
                self.stopping.clear()
                self.storing.clear()
                self.unacknowledged.clear()

    def pull(self, work: WorkItem, delivery: int | None = None) -> list[Effect]:
        if delivery is None:
            self.delivery += 1
            delivery = self.delivery
        self.unacknowledged.add(delivery)
        self.pulled.append((work.request.request_id, work.attempt))
        return self.step(WorkPulled(item=work, delivery=delivery))

    def end(
        self, key: Key, *, frames: int = 1, chunks: int = 0, failure: EngineFailure | None = None, now_ms: int = PULLED
    ) -> list[Effect]:
        del self.runs[key]
        self.stopping.discard(key)
        return self.step(AttemptEnded(key=key, frames=frames, chunks=chunks, failure=failure), now_ms)

    def decide(self, key: Key, *, won: bool = True) -> list[Effect]:
        del self.storing[key]
        return self.step(EventStored(key=key, won=won))

    def ask(self, request: ControlRequest, asker: int) -> list[Effect]:
        if isinstance(request, CancelAttempt):
            self.cancels[asker] = (request.request_id, request.attempt)
        return self.step(ControlAsked(request=request, asker=asker))

    def cancel(self, key: Key, asker: int, epoch: int = 1, reason: str = "client_cancelled") -> list[Effect]:
        order = CancelAttempt(epoch=Epoch(1, epoch), request_id=key[0], attempt=key[1], reason=reason)
        return self.ask(order, asker)


def kinds(effects: list[Effect]) -> list[type[Effect]]:
    return [type(effect) for effect in effects]


def only(effects: list[Effect], kind: type[Any]) -> Any:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


R1, R2, R3 = ("r1", 1), ("r2", 1), ("r3", 1)


# Start and end ---------------------------------------------------------------------------------------------


def test_a_completed_attempt_is_stored_then_closed_then_acknowledged() -> None:
    world = World()
    assert kinds(world.pull(item())) == [StartAttempt]
    counts = world.runs[R1]
    counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens = 10, 8, 3
    counts.first_token_at_ms, counts.finish_reason = PULLED + 5, "stop"
    event = only(world.end(R1, frames=4, chunks=3, now_ms=PULLED + 10), StoreEvent).event
    assert (event.outcome, event.reporter, event.worker) == ("completed", "worker", "w-1")
    assert event.billable and not event.retryable
    assert (event.prompt_tokens, event.cached_tokens, event.completion_tokens) == (10, 8, 3)
    assert event.last_seq == 4
    assert event.reserved_tokens == 20
    times = (event.admitted_at_ms, event.dispatched_at_ms, event.first_token_at_ms, event.ended_at_ms)
    assert times == (NOW - 20, NOW - 10, NOW - 5, NOW), "of one clock, whatever the worker's own says"
    effects = world.decide(R1)
    assert kinds(effects) == [CloseStream, AckWork, SendHeartbeat]
    assert only(effects, CloseStream).last == EndData(
        outcome="completed", finish_reason="stop", prompt_tokens=10, cached_tokens=8, completion_tokens=3
    )
    assert len(world.core.attempts) == 0


def test_a_lost_decision_sends_nothing_more_and_leaves_the_body_in_work() -> None:
    world = World()
    world.pull(item())
    world.end(R1)
    effects = world.decide(R1, won=False)
    assert only(effects, CloseStream).last is None
    assert kinds(effects) == [CloseStream, LeaveWork, SendHeartbeat]


def test_a_final_failure_sends_an_error_frame() -> None:
    world = World()
    world.pull(item())
    failure = EngineFailure("invalid_request", "bad schema", param="response_format", status=400)
    event = only(world.end(R1, frames=1, failure=failure), StoreEvent).event
    assert (event.outcome, event.error_code, event.billable, event.retryable) == (
        "failed",
        "invalid_request",
        False,
        False,
    )
    assert event.last_seq == 1
    last = only(world.decide(R1), CloseStream).last
    assert last == ErrorData(code="invalid_request", message="bad schema", param="response_format", status=400)


def test_a_retryable_failure_sends_no_frame() -> None:
    world = World()
    world.pull(item())
    event = only(world.end(R1, frames=2, failure=EngineFailure("engine_error", "x", retryable=True)), StoreEvent).event
    assert event.retryable and not event.engine_death
    assert event.last_seq == 1
    assert only(world.decide(R1), CloseStream).last is None


def test_an_unknown_code_of_an_engine_becomes_engine_error_and_long_messages_are_cut() -> None:
    world = World()
    world.pull(item())
    event = only(world.end(R1, failure=EngineFailure("surprise", "x" * 9999)), StoreEvent).event
    assert event.error_code == "engine_error"
    assert len(event.error_message) == outcomes.ERROR_MESSAGE_MAX


def test_a_redelivery_starts_nothing_and_every_copy_is_acknowledged() -> None:
    world = World()
    world.pull(item(), delivery=7)
    assert world.pull(item(), delivery=7) == []
    assert world.pull(item(), delivery=9) == []
    world.end(R1)
    effects = world.decide(R1)
    assert [effect.delivery for effect in effects if isinstance(effect, AckWork)] == [7, 9]
    assert kinds(world.pull(item(), delivery=11)) == [AckWork]


def test_an_impossible_event_tells_the_history() -> None:
    world = World()
    world.pull(item())
    with pytest.raises(BrokenLifecycle, match=r"running.*WorkPulled"):
        world.core.step(EventStored(key=R1, won=True), PULLED)
    with pytest.raises(BrokenLifecycle, match="not in flight"):
        world.core.step(AttemptEnded(key=R2, frames=0, chunks=0), PULLED)


# Room ------------------------------------------------------------------------------------------------------


def test_credit_is_the_free_slots_of_a_ready_worker() -> None:
    world = World(ready=False)
    assert world.core.credit() == 0
    world.step(EngineStarted(slots=3, kv_tokens=1000))
    assert world.core.credit() == 3
    world.pull(item("r1", choices=2))
    assert world.core.credit() == 1
    world.end(R1)
    assert world.core.credit() == 1, "an attempt counts until its end is stored"
    world.decide(R1)
    assert world.core.credit() == 3


def test_what_does_not_fit_waits_in_order_and_is_reported() -> None:
    world = World(slots=4, kv_tokens=100)
    world.pull(item("r1", prompt=50, output=20))
    assert world.pull(item("r2", prompt=30, output=10)) == []
    assert world.pull(item("r3", prompt=1, output=1)) == [], "the small one does not pass"
    assert world.core.credit() == 0
    assert [progress.request_id for progress in world.core.progress()] == ["r1", "r2", "r3"]
    assert kinds(world.end(R1)) == [StoreEvent, StartAttempt, StartAttempt]


def test_many_prompts_weigh_what_admission_reserved_for_them() -> None:
    """A hundred prompts of 500 tokens, two choices each: others run beside them, and the KV bound still holds."""
    world = World(slots=256, kv_tokens=60_000)
    assert kinds(world.pull(item("r1", prompt=50_000, output=16, choices=200))) == [StartAttempt]
    assert world.core.credit() == 56
    assert kinds(world.pull(item("r2", prompt=3000, output=100))) == [StartAttempt]
    assert world.pull(item("r3", prompt=3690, output=11)) == [], "53,200 and 3,100 tokens leave 3,700"
    assert kinds(world.end(R1)) == [StoreEvent, StartAttempt]


def test_an_idle_engine_takes_one_of_any_size() -> None:
    world = World(slots=2, kv_tokens=100)
    assert kinds(world.pull(item("r1", prompt=500, choices=9))) == [StartAttempt]
    assert world.core.credit() == 0
    assert world.pull(item("r2", prompt=1, output=1)) == []


def test_overbooking_widens_the_kv_bound() -> None:
    world = World(slots=2, kv_tokens=100, kv_overbooking=2.0)
    world.pull(item("r1", prompt=90))
    assert kinds(world.pull(item("r2", prompt=90))) == [StartAttempt]


# Refusals --------------------------------------------------------------------------------------------------


def test_a_lower_epoch_is_dropped_without_an_event() -> None:
    world = World()
    world.ask(Announce(epoch=Epoch(1, 5)), 1)
    assert kinds(world.pull(item(epoch=4))) == [LeaveWork]
    assert kinds(world.pull(item(epoch=5))) == [StartAttempt], "the new owner may give the same attempt"


def test_an_item_raises_the_epoch() -> None:
    world = World()
    world.pull(item(epoch=7))
    world.ask(Announce(epoch=Epoch(1, 6)), 1)
    assert world.answers[1] == "stale"


def test_another_tokenizer_fails_retryably() -> None:
    world = World(tokenizer_fingerprint="ours")
    event = only(world.pull(item(tokenizer_fingerprint="theirs")), StoreEvent).event
    assert (event.outcome, event.retryable, event.error_code) == ("failed", True, "unavailable")
    assert "tokenizer" in event.error_message
    assert StartAttempt in kinds(world.pull(item("r2", tokenizer_fingerprint="ours")))
    assert StartAttempt in kinds(world.pull(item("r3")))


# Cancel ----------------------------------------------------------------------------------------------------


def test_a_running_attempt_is_stopped_and_the_answer_follows_the_stored_event() -> None:
    world = World()
    world.pull(item())
    assert kinds(world.cancel(R1, 1)) == [StopAttempt]
    assert world.cancel(R1, 2) == []
    world.runs[R1].completion_tokens = 5
    event = only(world.end(R1, frames=6, chunks=5), StoreEvent).event
    assert (event.outcome, event.billable, event.completion_tokens) == ("cancelled", True, 5)
    assert world.answers == {}
    last = only(world.decide(R1), CloseStream).last
    assert last.outcome == "cancelled" and last.completion_tokens == 5
    assert world.answers == {1: "ended", 2: "ended"}
    world.cancel(R1, 3)
    assert world.answers[3] == "ended"


def test_a_cancel_before_the_first_token_is_not_billed() -> None:
    world = World()
    world.pull(item())
    world.cancel(R1, 1)
    event = only(world.end(R1), StoreEvent).event
    assert not event.billable


@pytest.mark.parametrize("reason", sorted(SERVICE_FAULTS))
def test_nobody_pays_for_what_the_service_cancels(reason: str) -> None:
    world = World()
    world.pull(item())
    world.runs[R1].completion_tokens = 5
    world.cancel(R1, 1, reason=reason)
    event = only(world.end(R1, frames=6, chunks=5), StoreEvent).event
    assert (event.outcome, event.billable, event.completion_tokens) == ("cancelled", False, 5)


def test_a_waiting_attempt_is_cancelled_without_a_start() -> None:
    world = World(slots=1)
    world.pull(item("r1"))
    world.pull(item("r2"))
    event = only(world.cancel(R2, 1), StoreEvent).event
    assert (event.outcome, event.completion_tokens, event.last_seq) == ("cancelled", 0, 0)
    world.decide(R2)
    world.end(R1)
    assert world.started == {R1: 1}


def test_a_cancel_that_overtakes_its_work_holds() -> None:
    world = World()
    world.cancel(R1, 1)
    assert world.answers == {1: "unknown"}
    assert kinds(world.pull(item())) == [LeaveWork]
    assert kinds(world.pull(item(attempt=2))) == [StartAttempt]


def test_a_later_owner_may_give_what_an_earlier_one_withdrew() -> None:
    world = World()
    world.cancel(R1, 1, epoch=3)
    assert kinds(world.pull(item(epoch=3))) == [LeaveWork]
    assert kinds(world.pull(item(epoch=4))) == [StartAttempt]


def test_a_failure_of_a_stopped_attempt_stays_a_cancel() -> None:
    world = World()
    world.pull(item())
    world.cancel(R1, 1)
    effects = world.end(R1, failure=DEAD)
    assert only(effects, StoreEvent).event.outcome == "cancelled"
    assert world.core.state == "ready", "a stopped attempt may tell of an engine that was replaced"


def test_a_cancel_of_a_lower_epoch_is_stale() -> None:
    world = World()
    world.pull(item(epoch=3))
    assert only(world.cancel(R1, 1, epoch=2), AnswerControl).answer.epoch == Epoch(1, 3)
    assert world.answers == {1: "stale"}
    assert R1 not in world.stopping


def test_tombstones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "TOMBSTONES_MAX", 3)
    world = World()
    for number in range(5):
        world.cancel((f"r{number}", 1), number)
    assert kinds(world.pull(item("r4"))) == [LeaveWork]
    world.refused.clear()
    assert kinds(world.pull(item("r0"))) == [StartAttempt]


# Eviction --------------------------------------------------------------------------------------------------


def test_an_eviction_drops_everything_without_a_word() -> None:
    world = World(slots=2)
    for name in ("r1", "r2", "r3"):
        world.pull(item(name))
    world.end(R2)
    effects = world.ask(Evict(epoch=Epoch(1, 2)), 1)
    assert kinds(effects) == [AnswerControl, Rejoin]
    assert len(world.core.attempts) == 0 and world.core.credit() == 0
    world.step(Joined(worker="w-2"))
    assert world.core.credit() == 2
    assert kinds(world.pull(item("r1", epoch=2))) == [LeaveWork], "never a second time"
    world.pull(item("r4", epoch=2))
    assert only(world.end(("r4", 1)), StoreEvent).event.worker == "w-2"


def test_a_stale_eviction_changes_nothing() -> None:
    world = World()
    world.pull(item(epoch=3))
    assert kinds(world.ask(Evict(epoch=Epoch(1, 2)), 1)) == [AnswerControl]
    assert len(world.core.attempts) == 1


# The engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told_by", ["attempt", "check"])
def test_the_engines_death_ends_all_that_ran_and_returns_what_waited(told_by: str) -> None:
    world = World(slots=2)
    for name in ("r1", "r2", "r3"):
        world.pull(item(name))
    if told_by == "attempt":
        effects = world.end(R1, failure=DEAD)
    else:
        effects = world.step(EngineLost(reason="deaf"))
        world.end(R1)
    assert only(effects, RebuildEngine)
    assert world.core.state == "engine_down" and world.core.credit() == 0
    world.end(R2)
    rows = {key: (s.event.outcome, s.event.retryable, s.event.engine_death) for key, s in world.storing.items()}
    assert rows == {R1: ("failed", True, True), R2: ("failed", True, True), R3: ("failed", True, False)}
    event = only(world.pull(item("r4")), StoreEvent).event
    assert (event.retryable, event.engine_death) == (True, False)
    world.step(EngineStarted(slots=2, kv_tokens=1000))
    for key in list(world.storing):
        world.decide(key)
    assert world.core.credit() == 2


@pytest.mark.parametrize("told_by", ["attempt", "supervisor"])
def test_the_engines_death_is_put_down_to_the_suspects_that_it_ran_and_without_any_to_all(told_by: str) -> None:
    for suspects, accused in (({}, [3, 3, 3]), ({"r2": 1, "r3": 1}, [0, 1, 0]), ({"r3": 5}, [0, 0, 1])):
        world = World(slots=3)
        for name in ("r1", "r2", "r3"):
            work = item(name, body_hash=name)
            world.pull(msgspec.structs.replace(work, suspect_tokens=suspects.get(name, 0)))
        world.runs[R3].completion_tokens = 1
        if told_by == "attempt":
            world.end(R1, failure=DEAD)
        else:
            world.step(EngineLost(reason="deaf"))
            world.end(R1)
        for key in (R2, R3):
            world.end(key)
        assert [world.storing[key].event.accused for key in (R1, R2, R3)] == accused
        assert {world.storing[key].event.body_hash for key in (R1, R2, R3)} == {"r1", "r2", "r3"}


def test_only_what_died_or_was_suspected_names_its_body() -> None:
    world = World()
    world.pull(item("r1", body_hash="h1"))
    world.pull(msgspec.structs.replace(item("r2", body_hash="h2"), suspect_tokens=9))
    assert only(world.end(R1), StoreEvent).event.body_hash == ""
    assert only(world.end(R2), StoreEvent).event.body_hash == "h2"


def test_only_the_first_word_of_a_death_counts() -> None:
    world = World()
    world.step(EngineLost(reason="a"))
    assert world.step(EngineLost(reason="b")) == []


def sampled(prefill: int, decode: int, steps: int = 0) -> EngineSampled:
    return EngineSampled(stats=EngineStats(prefill_tokens_total=prefill, decode_tokens_total=decode, steps_total=steps))


def test_an_engine_that_does_nothing_with_work_is_rebuilt() -> None:
    world = World(stall_samples=3)
    for _ in range(9):
        assert world.step(sampled(0, 0)) == [], "idle is no stall"
    world.pull(item())
    for _ in range(2):
        assert world.step(sampled(0, 0)) == []
    effects = world.step(sampled(0, 0))
    assert {StopAttempt, RebuildEngine} <= set(kinds(effects))
    assert only(world.end(R1), StoreEvent).event.engine_death


def test_one_hanging_attempt_among_others_fails_alone() -> None:
    world = World(stall_samples=3)
    world.pull(item("r1"))
    world.pull(item("r2"))
    for key in (R1, R2):
        world.runs[key].completion_tokens = 1
    effects: list[Effect] = []
    for tokens in range(2, 6):
        world.runs[R2].completion_tokens = tokens
        effects += world.step(sampled(20, tokens))
    assert kinds(effects) == [StopAttempt]
    assert world.core.state == "ready"
    event = only(world.end(R1), StoreEvent).event
    assert (event.error_code, event.retryable, event.engine_death) == ("engine_error", True, False)


def test_a_long_prefill_is_progress() -> None:
    """Also while none of it is counted: vLLM tells of a prompt's tokens when all of them are computed."""
    world = World(stall_samples=3)
    world.pull(item())
    for step in range(10):
        assert world.step(sampled(0, 0, steps=step)) == []
    world.step(sampled(0, 0, steps=9))
    world.step(sampled(0, 0, steps=9))
    assert RebuildEngine in kinds(world.step(sampled(0, 0, steps=9)))


# Shutdown --------------------------------------------------------------------------------------------------


def test_whose_deadline_passes_without_a_token_ends_by_it_and_nobody_pays() -> None:
    """It had 60 s from its admission, 10 ms before its dispatch. What has begun has cost the engine its prompt."""
    world = World(slots=2)
    for number, output in enumerate((400, 400, 400), 1):
        world.pull(item(f"r{number}", output=output))
    world.runs["r1", 1].completion_tokens = 1
    assert not world.stopping
    world.step(sampled(1, 1), PULLED + 59_989)
    assert not world.stopping and not world.storing
    world.step(sampled(2, 2), PULLED + 59_990)
    assert world.stopping == {("r2", 1)} and list(world.storing) == [("r3", 1)]
    world.end(("r2", 1), now_ms=PULLED + 60_000)
    for key, spent in ((("r2", 1), 10), (("r3", 1), 0)):
        event = world.storing[key].event
        assert (event.outcome, event.error_code, event.billable) == ("expired", "deadline_exceeded", False)
        assert (event.spent_input_tokens, event.retryable) == (spent, False)
        [close] = [it for it in world.decide(key) if isinstance(it, CloseStream)]
        assert isinstance(close.last, ErrorData) and close.last.code == "deadline_exceeded"


def test_a_drain_returns_what_waits_and_lets_run_what_runs() -> None:
    world = World(slots=1)
    world.pull(item("r1"))
    world.pull(item("r2"))
    effects = world.step(DrainStarted())
    event = only(effects, StoreEvent).event
    assert (event.request_id, event.error_code, event.retryable) == ("r2", "shutting_down", True)
    assert kinds(effects)[-1] is SendHeartbeat
    assert world.core.state == "draining" and world.core.credit() == 0
    assert only(world.pull(item("r3")), StoreEvent).event.retryable
    assert only(world.end(R1), StoreEvent).event.outcome == "completed"
    world.step(EngineStarted(slots=2, kv_tokens=1000))
    assert world.core.state == "draining"


@pytest.mark.parametrize(
    ("stream", "chunks", "retryable"), [(True, 3, False), (True, 0, True), (False, 1, True), (False, 0, True)]
)
def test_after_the_grace_time_only_a_stream_that_began_is_final(stream: bool, chunks: int, retryable: bool) -> None:
    world = World()
    world.pull(item(stream=stream))
    world.step(DrainStarted())
    assert kinds(world.step(GraceEnded())) == [StopAttempt]
    event = only(world.end(R1, frames=chunks + 1, chunks=chunks), StoreEvent).event
    assert (event.error_code, event.retryable, event.billable) == ("shutting_down", retryable, False)
    last = only(world.decide(R1), CloseStream).last
    assert (last is None) == retryable
    assert last is None or last.code == "shutting_down"


# Histories -------------------------------------------------------------------------------------------------


def one_step(world: World, random_: random.Random) -> None:
    """Something that may happen now."""
    key = (f"r{random_.randrange(12)}", random_.randrange(1, 3))
    asker = len(world.cancels) + 1000
    choice = random_.randrange(100)
    if choice < 35 and world.core.worker:
        work = item(
            key[0],
            key[1],
            epoch=random_.randrange(1, 4) if random_.random() < 0.2 else 3,
            prompt=random_.choice([1, 40, 90, 300]),
            choices=random_.choice([1, 1, 1, 3]),
            stream=random_.random() < 0.7,
            tokenizer_fingerprint="other" if random_.random() < 0.05 else "",
        )
        old = random_.choice(sorted(world.unacknowledged)) if world.unacknowledged else None
        again = old is not None and random_.random() < 0.1
        if again and (attempt := world.core.attempts.get(key)):
            old = attempt.deliveries[0]
            world.pull(work, old)
        else:
            world.pull(work)
    elif choice < 55 and world.runs:
        target = random_.choice(sorted(world.runs))
        world.runs[target].completion_tokens += random_.randrange(3)
        failures = [None, None, EngineFailure("engine_error", "x", retryable=random_.random() < 0.5)]
        failure = DEAD if random_.random() < 0.05 else random_.choice(failures)
        world.end(target, frames=random_.randrange(1, 5), chunks=random_.randrange(3), failure=failure)
    elif choice < 75 and world.storing:
        world.decide(random_.choice(sorted(world.storing)), won=random_.random() < 0.9)
    elif choice < 88:
        world.cancel(key, asker, epoch=random_.randrange(2, 5))
    elif choice < 90:
        world.ask(Announce(epoch=Epoch(1, random_.randrange(2, 4))), 10_000 + random_.randrange(10**9))
    elif choice < 91:
        world.ask(Evict(epoch=Epoch(1, 3)), 10_000 + random_.randrange(10**9))
    elif choice < 93:
        world.step(EngineLost(reason="died"))
    elif choice < 97:
        world.step(sampled(random_.randrange(2), random_.randrange(2)))
    elif not world.core.worker:
        world.names += 1
        world.step(Joined(worker=f"w-{world.names + 1}"))
    elif world.core.state in ("starting", "engine_down"):
        world.step(EngineStarted(slots=world.core.attempts.slots or random_.randrange(1, 4), kv_tokens=200))


def finish(world: World) -> None:
    """Drain, then let everything that was begun end."""
    world.step(DrainStarted())
    world.step(GraceEnded())
    assert set(world.runs) == world.stopping
    for key in sorted(world.runs):
        world.end(key)
    for key in sorted(world.storing):
        world.decide(key)
    assert len(world.core.attempts) == 0
    assert not world.unacknowledged
    assert {key for key in world.cancels.values() if key in world.runs} == set()
    assert set(world.answers) >= set(world.cancels), "a cancel without an answer"
    for key in world.started:
        assert world.stored[key] == 1 or key in world.evicted, "started and never ended"


@settings(max_examples=300, deadline=None)
@given(random_=st.randoms(use_true_random=False), steps=st.integers(1, 100))
def test_histories_keep_the_rules(random_: random.Random, steps: int) -> None:
    world = World(slots=random_.randrange(1, 4), kv_tokens=200, stall_samples=3, tokenizer_fingerprint="ours")
    for _ in range(steps):
        one_step(world, random_)
    finish(world)


def test_events_and_effects_are_frozen() -> None:
    for kind in (*Event.__subclasses__(), *Effect.__subclasses__()):
        assert kind.__struct_config__.frozen, kind
    assert msgspec.structs.fields(AckWork)[0].name == "delivery"


# Another version -------------------------------------------------------------------------------------------


def switching(**options: Any) -> World:
    """A worker of v1 that has fetched v2."""
    world = World(version="v1", **options)
    assert kinds(world.ask(SwitchVersion(epoch=Epoch(1, 1), version="v2"), 1)) == [AnswerControl, FetchVersion]
    return world


def test_a_switch_waits_for_what_runs_and_loads_then() -> None:
    world = switching()
    world.pull(item())
    world.step(VersionFetched(version="v2"))
    assert (world.core.state, world.core.credit()) == ("draining", 0)
    world.step(DrainKnown())
    world.end(("r1", 1))
    assert LoadVersion in kinds(world.decide(("r1", 1)))
    assert (world.core.state, world.core.worker) == ("starting", "")
    world.step(Joined(worker="w-2"))
    world.step(EngineStarted(slots=2, kv_tokens=100, tokenizer_fingerprint="v2's"))
    assert (world.core.state, world.core.reason) == ("ready", "")


def test_a_version_that_does_not_start_gives_way_to_the_one_before() -> None:
    world = switching()
    world.step(VersionFetched(version="v2"))
    assert only(world.step(DrainKnown()), LoadVersion).version == "v2"
    world.step(Joined(worker="w-2"))
    assert only(world.step(EngineRefused(reason="no")), LoadVersion).version == "v1"
    world.step(Joined(worker="w-3"))
    world.step(EngineStarted(slots=2, kv_tokens=100))
    assert (world.core.state, world.core.reason) == ("ready", "v2 refused: no")
    assert FetchVersion in kinds(world.ask(SwitchVersion(epoch=Epoch(1, 1), version="v2"), 2)), "it is asked again"


def test_a_first_version_that_does_not_start_is_tried_until_it_does() -> None:
    world = World(version="v1", ready=False)
    assert LoadVersion not in kinds(world.step(EngineRefused(reason="no")))
    assert (world.core.state, world.core.reason, world.core.credit()) == ("failed", "no", 0)
    world.step(EngineStarted(slots=2, kv_tokens=100))
    assert (world.core.state, world.core.reason) == ("ready", "")


def test_files_that_cannot_be_had_change_nothing_but_what_is_said() -> None:
    world = switching()
    world.pull(item())
    world.step(VersionRefused(version="v2", reason="no room"))
    assert (world.core.state, world.core.reason) == ("ready", "v2 refused: no room")
    world.step(VersionFetched(version="v2"))
    assert world.core.state == "ready", "it is not wanted any more"


def test_the_last_order_counts() -> None:
    world = switching()
    world.ask(SwitchVersion(epoch=Epoch(1, 1), version="v1"), 2)
    world.step(VersionFetched(version="v2"))
    assert world.core.state == "ready"
    world.ask(SwitchVersion(epoch=Epoch(1, 1), version="v2"), 3)
    world.ask(SwitchVersion(epoch=Epoch(1, 1), version="v3"), 4)
    world.step(VersionFetched(version="v2"))
    assert world.core.state == "ready"
    world.step(VersionFetched(version="v3"))
    assert only(world.step(DrainKnown()), LoadVersion).version == "v3"


def test_an_engine_that_dies_while_its_version_is_left_is_not_rebuilt() -> None:
    world = switching()
    world.pull(item())
    world.step(VersionFetched(version="v2"))
    world.step(DrainKnown())
    assert RebuildEngine not in kinds(world.step(EngineLost(reason="it died")))
    world.end(("r1", 1))
    assert LoadVersion in kinds(world.decide(("r1", 1)))


def test_what_was_on_its_way_to_a_worker_that_switches_is_given_back() -> None:
    world = switching()
    assert LoadVersion not in kinds(world.step(VersionFetched(version="v2"))), "its owner does not know yet"
    stored = only(world.pull(item()), StoreEvent).event
    assert (stored.error_code, stored.retryable, stored.given_back) == ("shutting_down", True, True)
    assert LoadVersion not in kinds(world.step(DrainKnown()))
    assert LoadVersion in kinds(world.decide(("r1", 1)))


def test_a_worker_that_was_started_for_a_version_goes_with_the_others_once_it_is_told() -> None:
    world = World(version="v1", pinned=True)
    assert SendHeartbeat in kinds(world.ask(SwitchVersion(epoch=Epoch(1, 1), version="v1"), 1))
    assert (world.core.pinned, world.core.state) == (False, "ready")


def test_a_worker_that_is_told_to_stop_switches_no_more() -> None:
    world = switching()
    world.pull(item())
    world.step(VersionFetched(version="v2"))
    world.step(DrainKnown())
    world.step(DrainStarted())
    world.end(("r1", 1))
    assert LoadVersion not in kinds(world.decide(("r1", 1)))
    assert world.core.state == "draining"


# Held by an operator ----------------------------------------------------------------------------------------


def test_a_worker_that_is_held_takes_nothing_more_and_what_runs_goes_on() -> None:
    world = World(slots=1)
    running = world.pull(item("r1"))
    waiting = world.pull(item("r2"))
    assert kinds(world.ask(Hold(epoch=Epoch(1, 1), held=True), 1))[0] is AnswerControl
    assert world.core.shown[0] == "held" and world.core.credit() == 0 and world.core.state == "ready"
    assert [attempt.item.request.request_id for attempt in world.core.attempts if attempt.stage == "running"] == ["r1"]
    del running, waiting
    late = world.pull(item("r3"))
    assert [each.event.error_code for each in late if isinstance(each, StoreEvent)] == ["shutting_down"]
    world.ask(Hold(epoch=Epoch(1, 1), held=False), 2)
    assert world.core.shown == ("ready", "")


def test_an_engine_that_dies_while_its_worker_is_held_is_made_again() -> None:
    world = World()
    world.ask(Hold(epoch=Epoch(1, 1), held=True), 1)
    assert RebuildEngine in kinds(world.step(EngineLost(reason="died")))
    states = [world.core.shown[0]]
    world.step(EngineStarted(slots=2, kv_tokens=1000))
    states.append(world.core.shown[0])
    assert states == ["engine_down", "held"] and world.core.credit() == 0
    world.ask(Hold(epoch=Epoch(1, 1), held=False), 2)
    assert world.core.credit() == 2
