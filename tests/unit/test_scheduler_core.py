"""The scheduler's core under a virtual clock: each rule by name."""

from pathlib import Path

import msgspec
import pytest

from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import Epoch
from contracts.messages.control import (
    CancelAttempt,
    CancelReason,
    CancelRequest,
    ControlAnswer,
    Progress,
    StreamOwnerHeartbeat,
)
from contracts.messages.frames import ErrorData, LostData
from contracts.messages.records import TenantLimits, TenantRecord
from scheduler.core import events
from scheduler.core.transitions import TRANSITIONS, InvalidTransition, State, Trigger, mermaid
from scheduler.effects import work_id
from tests.support.scheduler_world import EPOCH, World

ERROR = msgspec.json.Decoder(ErrorData)
LOST = msgspec.json.Decoder(LostData)


def attempt_event(made: World, request_id: str, **fields: object) -> AttemptEvent:
    """An end of attempt 1, stored by the scheduler unless ``fields`` say otherwise."""
    asked = made.asked[request_id]
    known = {
        "request_id": request_id,
        "attempt": 1,
        "tenant": asked.tenant,
        "key_id": asked.key_id,
        "model": asked.model,
        "version": "v1",
        "endpoint": asked.endpoint,
        "priority": asked.priority,
        "reporter": "scheduler",
    }
    return AttemptEvent(**known | fields)  # type: ignore[arg-type]


def test_a_request_is_dispatched_acknowledged_and_settled() -> None:
    made = World()
    worker = made.ready_worker()
    request_id = made.submit()
    made.run_pending()
    assert not made.requests, "acknowledged once WORK holds the attempt"
    made.pull(worker)
    progress = worker.running.pop((request_id, 1))
    made.end(worker, msgspec.structs.replace(progress, completion_tokens=4), "completed")
    made.run_pending()
    tombstone = made.core.tombstones.ended(request_id)
    assert tombstone is not None and tombstone.event.outcome == "completed"
    assert made.core.admission.reserved_tokens == 0 and not made.core.requests


def test_admission_is_idempotent_by_request_id() -> None:
    made = World()
    request_id = made.ask(tenant="t0")
    reserved = made.core.admission.reserved_tokens
    made.feed(events.AdmissionAsked(made.asked[request_id], "again"))
    assert made.answers["again"] == made.answers[request_id]
    assert made.core.admission.reserved_tokens == reserved


def test_exactly_one_of_ten_parallel_requests_fits_the_token_limit() -> None:
    made = World()
    limits = TenantLimits(output_tpm=200)
    made.feed(events.TenantChanged("t0", TenantRecord(name="t0", limits=limits)))
    worker = made.ready_worker(slots=20)
    ids = [made.submit(max_output_tokens=120) for _ in range(10)]
    admitted = [i for i in ids if made.answers[i].admitted]
    assert len(admitted) == 1
    assert {made.answers[i].code for i in ids if i not in admitted} == {"rate_limit_exceeded"}
    made.run_pending()
    made.pull(worker)
    progress = worker.running.pop((admitted[0], 1))
    made.end(worker, msgspec.structs.replace(progress, completion_tokens=40), "completed")
    made.run_pending()
    assert made.core.admission.quotas["t0"].output_bucket.level(made.now) == pytest.approx(160, abs=1)


def test_the_ledger_s_total_is_held_against_the_monthly_budget() -> None:
    made = World()
    made.now = 1_801_353_600_000  # 2027-01-31
    made.feed(events.TenantChanged("t0", TenantRecord(name="t0", monthly_budget_tokens=100)))
    made.feed(events.BudgetSeen("t0", "2026-12", 100))
    assert made.answers[made.ask()].admitted, "nothing is known of this month"
    made.feed(events.BudgetSeen("t0", "2027-01", 79))
    assert made.answers[made.ask()].admitted, "20 are reserved"
    assert made.answers[made.ask()].code == "rate_limit_exceeded", "40 are"
    made.feed(events.BudgetSeen("t0", "2027-01", 100))
    assert made.answers[made.ask()].code == "insufficient_quota"
    assert made.answers[made.ask(tenant="t1")].admitted
    made.now += 24 * 3_600_000
    assert made.answers[made.ask()].admitted


@pytest.mark.parametrize("kind", ["concurrency", "tokens", "queue"])
def test_a_refused_request_charges_nothing(kind: str) -> None:
    made = World(limits={"queued_requests": 1})
    limits = TenantLimits(rpm=5, output_tpm=1000, concurrency=1 if kind == "concurrency" else None)
    made.feed(events.TenantChanged("t0", TenantRecord(name="t0", limits=limits)))
    made.submit()
    quota = made.core.admission.quotas["t0"]
    before = (
        quota.request_bucket.level(made.now),
        quota.output_bucket.level(made.now),
        made.core.admission.reserved_tokens,
    )
    refused = made.submit(max_output_tokens=995 if kind == "tokens" else 10)
    answer = made.answers[refused]
    assert not answer.admitted
    assert answer.code == ("overloaded" if kind == "queue" else "rate_limit_exceeded")
    assert answer.retry_after_s is not None and 1 <= answer.retry_after_s <= 60
    assert before == (
        quota.request_bucket.level(made.now),
        quota.output_bucket.level(made.now),
        made.core.admission.reserved_tokens,
    )


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        (TenantLimits(rpm=0), "requests per minute"),
        (TenantLimits(input_tpm=0), "input tokens per minute"),
        (TenantLimits(output_tpm=0), "output tokens per minute"),
        (TenantLimits(concurrency=0), "concurrent requests"),
        (TenantLimits(queued_requests=0), "queued requests"),
        (TenantLimits(queued_tokens=0), "queued tokens"),
    ],
)
def test_e07_a_limit_of_0_says_so_and_nothing_of_the_prompt(limits: TenantLimits, said: str) -> None:
    made = World()
    made.feed(events.TenantChanged("t2", TenantRecord(name="t2", limits=limits)))
    answer = made.answers[made.submit(tenant="t2")]
    assert (answer.admitted, answer.code, answer.retry_after_s) == (False, "permission_denied", None)
    assert f"limit of {said} for this model is 0" in answer.message and "prompt" not in answer.message
    if limits.output_tpm == 0:  # What asks for no output needs none of it.
        assert made.answers[made.submit(tenant="t2", max_output_tokens=0)].admitted
    made.feed(events.TenantChanged("t2", TenantRecord(name="t2")))
    assert made.answers[made.submit(tenant="t2")].admitted, "lifted at once"


def test_what_never_fits_the_tenants_share_of_the_queue_is_told_so() -> None:
    made = World()
    made.feed(events.TenantChanged("t2", TenantRecord(name="t2", limits=TenantLimits(queued_tokens=100))))
    answer = made.answers[made.submit(tenant="t2", prompt_tokens=95)]
    assert answer.code == "request_exceeds_limit" and "100 queued tokens" in answer.message


def left_before_a_token(made: World, reason: CancelReason, *, dispatched: bool = True) -> str:
    """A request of ``t1`` with 2,000 prompt tokens whose caller leaves while its worker reads the prompt."""
    worker = made.ready_worker() if dispatched else None
    request_id = made.submit(tenant="t1", prompt_tokens=2000)
    made.run_pending()
    if worker is not None:
        made.pull(worker)
    made.feed(events.CancelAsked("t1", CancelRequest(request_id=request_id, reason=reason), None))
    made.run_pending()
    assert made.core.tombstones.ended(request_id) is not None
    return request_id


@pytest.mark.parametrize("reason", ["client_disconnected", "client_cancelled", "slow_reader"])
def test_d01_who_leaves_before_the_first_token_has_spent_the_prompt(reason: CancelReason) -> None:
    made = World()
    left_before_a_token(made, reason)
    quota = made.core.admission.quotas["t1"]
    assert quota.input_bucket.level(made.now) == 20_000 - 2000
    assert quota.output_bucket.level(made.now) == 5000, "what was never generated comes back"
    assert made.core.queue.shares["t1"].counter == 2000


@pytest.mark.parametrize("reason", ["gateway_lost", "shutdown", "relay_failed", "publish_unconfirmed"])
def test_d01_what_the_service_ended_is_given_back(reason: CancelReason) -> None:
    made = World()
    left_before_a_token(made, reason)
    assert made.core.admission.quotas["t1"].input_bucket.level(made.now) == 20_000
    assert made.core.queue.shares["t1"].counter == 0


def test_d01_who_leaves_the_queue_has_spent_nothing() -> None:
    made = World()
    left_before_a_token(made, "client_disconnected", dispatched=False)
    assert made.core.admission.quotas["t1"].input_bucket.level(made.now) == 20_000


def test_d01_an_attempt_that_its_worker_never_had_is_spent_by_who_left_it() -> None:
    """The scheduler stores that end itself: a caller that is quick enough must not be free of it."""
    made = World()
    made.ready_worker()
    request_id = made.submit(tenant="t1", prompt_tokens=2000)
    made.run_pending()
    made.feed(events.CancelAsked("t1", CancelRequest(request_id=request_id), None))
    made.run_pending()
    assert made.attempts[request_id, 1].reporter == "scheduler"
    assert made.core.admission.quotas["t1"].input_bucket.level(made.now) == 20_000 - 2000


def test_d01_a_new_owner_knows_what_was_spent() -> None:
    made = World()
    left_before_a_token(made, "client_disconnected")
    made.takeover()
    elapsed_ms = made.now - 1_000_000
    level = made.core.admission.quotas["t1"].input_bucket.level(made.now)
    assert level == pytest.approx(min(20_000, 18_000 + 20_000 * elapsed_ms / 60_000))


def test_a_request_larger_than_a_bucket_is_told_which_limit() -> None:
    made = World()
    made.feed(events.TenantChanged("t0", TenantRecord(name="t0", limits=TenantLimits(input_tpm=100))))
    answer = made.answers[made.submit(prompt_tokens=101)]
    assert answer.code == "request_exceeds_limit" and "100 input tokens per minute" in answer.message


def test_a_reservation_expires_when_its_request_never_arrives() -> None:
    made = World()
    made.feed(events.TenantChanged("t0", TenantRecord(name="t0", limits=TenantLimits(rpm=2))))
    made.ask(tenant="t0")
    made.pass_time(1_500)
    assert made.core.admission.reserved_tokens == 0
    assert made.core.admission.quotas["t0"].request_bucket.level(made.now) == 2


def test_a_request_stored_after_its_time_expires_and_never_runs() -> None:
    made = World()
    made.ready_worker()
    request_id = made.ask(tenant="t0", stream_owner="")
    made.pass_time(1_500)
    made.publish(request_id)
    made.run_pending()
    assert made.attempts[(request_id, 0)].outcome == "expired"
    assert not made.requests and not made.work


def test_the_deadline_passes_in_the_queue() -> None:
    made = World()
    request_id = made.submit(deadline_ms=3_000)
    made.pass_time(3_100)
    made.run_pending()
    error = ERROR.decode(made.frames[request_id][-1].data)
    assert error.code == "deadline_exceeded"
    assert made.attempts[(request_id, 0)].outcome == "expired"
    assert not made.requests


def test_a_cancel_in_the_queue_ends_as_attempt_zero_and_is_durable() -> None:
    made = World()
    request_id = made.submit()
    made.feed(events.CancelAsked("t0", CancelRequest(request_id=request_id), None))
    assert not made.cancel_answers, "durable only when the end is stored"
    made.run_pending()
    assert made.cancel_answers[0].durable and made.attempts[(request_id, 0)].outcome == "cancelled"
    made.ready_worker()
    made.run_pending()
    assert not made.work


def test_a_cancel_that_overtakes_its_request_holds() -> None:
    made = World()
    made.asked["late"] = made.asked[made.ask(tenant="t0", stream_owner="")]
    made.feed(events.CancelAsked("t0", CancelRequest(request_id="late"), None))
    asked = msgspec.structs.replace(made.asked["late"], request_id="late")
    made.feed(events.AdmissionAsked(asked, "late"))
    assert made.answers["late"].code == "cancelled"


def test_nobody_cancels_for_another_tenant() -> None:
    made = World()
    request_id = made.submit()
    made.feed(events.CancelAsked("t1", CancelRequest(request_id=request_id), None))
    made.run_pending()
    assert made.core.requests[request_id].state is State.QUEUED


def test_a_lost_worker_before_the_first_token_gives_a_second_attempt() -> None:
    made = World()
    first = made.ready_worker()
    request_id = made.submit()
    made.run_pending()
    made.pull(first)
    first.running[(request_id, 1)] = Progress(request_id=request_id, attempt=1, prompt_tokens=10)
    made.feed(events.WorkerSeen(first.beat()))
    first.alive = False
    for _ in range(8):
        made.now += 500
        made.feed(events.LoopbackSeen())
        if made.core.pool.evicted:
            break
    second = made.ready_worker()
    made.run_pending()
    assert made.attempts[(request_id, 1)].outcome == "lost"
    lost = made.frames[request_id][-1]
    assert (lost.kind, lost.attempt, LOST.decode(lost.data).retry) == ("lost", 1, True)
    made.pull(second)
    assert (request_id, 2) in second.running
    assert len(made.work) == 1, "the lost attempt's message is gone"


def lost_unseen_or_not(made: World, **fields: object) -> str:
    """A stream whose worker died between its first token and its next heartbeat; the caller has seen text."""
    request_id = made.submit(**fields)
    made.seen.add(request_id)
    worker = made.ready_worker()
    made.run_pending()
    made.pull(worker)
    worker.alive = False
    for _ in range(8):
        made.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner="_gw.g")))
        made.silence(1)
    made.ready_worker()
    made.run_pending()
    assert made.core.requests[request_id].state is State.CLEARING
    return request_id


def test_nothing_runs_again_whose_text_was_seen_and_told_by_no_heartbeat() -> None:
    made = World()
    request_id = lost_unseen_or_not(made, stream_owner="_gw.g")
    for _ in range(10):
        made.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner="_gw.g")))
        made.pass_time(500)
    assert len([frame for frame in made.frames[request_id] if frame.kind == "lost"]) > 3, "it is asked again"
    made.feed(events.StatusAsked("t0", request_id, None, void_below=1))
    made.feed(events.StatusAsked("stranger", request_id, None, void_below=2))
    assert made.core.requests[request_id].state is State.CLEARING
    made.feed(events.CancelAsked("t0", CancelRequest(request_id=request_id, reason="worker_lost"), None))
    made.run_pending()
    assert not made.core.requests and made.attempts[(request_id, 2)].outcome == "cancelled"
    assert not made.attempts[(request_id, 2)].billable and not made.attempts[(request_id, 1)].billable


def test_a_deposed_owner_hears_of_the_loss_of_what_it_had_admitted() -> None:
    made = World()
    request_id = made.ask()
    lost = attempt_event(made, request_id, outcome="lost", worker="w", retryable=True)
    made.feed(events.TerminalStored(lost))
    assert made.core.requests[request_id].state is State.ADMITTED


def test_a_takeover_asks_again_what_was_seen() -> None:
    made = World()
    request_id = lost_unseen_or_not(made, stream_owner="_gw.g")
    take_over(made)
    assert made.core.requests[request_id].state is State.CLEARING
    made.seen.clear()
    for _ in range(4):
        made.pass_time(500)
    assert made.core.requests[request_id].attempt == 2 and not made.core.clearing


def test_who_sends_no_heartbeats_and_says_nothing_of_what_was_seen_is_told_of_the_loss() -> None:
    made = World()
    request_id = lost_unseen_or_not(made)
    for _ in range(24):
        made.pass_time(500)
    assert not made.core.requests
    assert ERROR.decode(made.frames[request_id][-1].data).code == "worker_lost"


def test_the_deadline_passes_while_nobody_says_what_was_seen() -> None:
    made = World()
    request_id = lost_unseen_or_not(made, deadline_ms=9_000)
    for _ in range(14):
        made.pass_time(500)
    assert not made.core.requests and made.attempts[(request_id, 2)].outcome == "expired"


def test_a_lost_worker_after_tokens_ends_a_stream_and_repeats_a_gathered_answer() -> None:
    for stream in (True, False):
        made = World()
        worker = made.ready_worker()
        request_id = made.submit(stream=stream)
        made.run_pending()
        made.pull(worker)
        worker.running[(request_id, 1)] = Progress(request_id=request_id, attempt=1, completion_tokens=3)
        made.feed(events.WorkerSeen(worker.beat()))
        worker.alive = False
        made.silence()
        frame = made.frames[request_id][-1]
        if stream:
            assert ERROR.decode(frame.data).code == "worker_lost"
            assert made.attempts[(request_id, 1)].completion_tokens == 3
            assert made.core.tombstones.ended(request_id)
        else:
            assert frame.kind == "lost" and made.core.requests[request_id].state is State.QUEUED


def test_without_loopback_heartbeats_nobody_is_lost() -> None:
    made = World()
    made.ready_worker()
    made.now += 60_000
    made.feed(events.TimePassed())
    assert made.core.pool.workers


def test_a_worker_that_never_acknowledges_the_epoch_is_lost_and_blocks_nobody() -> None:
    made = World()
    deaf, well = made.ready_worker(), made.ready_worker()
    made.begin_term()
    while deaf.name not in made.core.pool.evicted:
        made.now += 500
        for worker in (deaf, well):
            made.feed(events.WorkerSeen(worker.beat()))
        well.epoch = made.core.epoch
        made.feed(events.LoopbackSeen())
    assert made.core.pool.beats == 2 * made.core.settings.lost_after_beats + 1
    assert not made.core.pool.unacknowledged() and list(made.core.pool.workers) == [well.name]


def test_who_waits_for_a_version_that_nobody_has_stands_before_nobody() -> None:
    made = World()
    made.feed(events.TenantChanged("t0", TenantRecord(name="t0")))
    for _ in range(50):
        made.submit(version="v9")
    made.ready_worker(slots=2)
    served = {made.submit(), made.submit()}
    made.run_pending()
    assert {item.request.request_id for item in made.work.values()} == served


def test_a_lost_stream_owner_cancels_its_requests() -> None:
    made = World()
    request_id = made.submit(stream_owner="g1")
    made.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner="g1")))
    made.silence()
    assert made.attempts[(request_id, 0)].outcome == "cancelled"


def test_a_large_request_is_passed_for_the_starvation_timeout_and_then_waits_for_one_worker_only() -> None:
    made = World()
    worker = made.ready_worker(slots=10, kv_tokens=1000)
    small = [made.submit(prompt_tokens=290, max_output_tokens=10, tenant="t1") for _ in range(2)]
    made.run_pending()
    made.pull(worker)
    large = made.submit(prompt_tokens=890, max_output_tokens=10)
    passed = made.submit(prompt_tokens=290, max_output_tokens=10, tenant="t1")
    made.run_pending()
    assert passed in worker_names(made), "small ones pass until the starvation timeout"
    made.now += 6_000
    made.feed(events.TimePassed())
    blocked = made.submit(prompt_tokens=50, max_output_tokens=10, tenant="t1")
    made.run_pending()
    assert blocked not in worker_names(made)
    made.pull(worker)
    for key in [(request_id, 1) for request_id in [*small, passed]]:
        made.end(worker, worker.running.pop(key), "completed")
    made.run_pending()
    assert large in worker_names(made)


def worker_names(made: World) -> set[str]:
    return {item.request.request_id for item in made.work.values()}


def test_takeover_adopts_work_and_drops_what_has_ended() -> None:
    made = World()
    worker = made.ready_worker(slots=4)
    running, ended = made.submit(), made.submit()
    queued = made.submit()
    made.run_pending()
    made.pull(worker)
    made.end(worker, worker.running.pop((ended, 1)), "failed", retryable=True)
    items = dict(made.work)
    after = World()
    after.begin_term()
    after.requests, after.work, after.attempts = made.requests, items, made.attempts
    for event in made.attempts.values():
        after.feed(events.TerminalStored(event))
    for seq, item in items.items():
        after.feed(events.WorkFound(item, seq))
    assert set(after.core.requests) == {running, ended, queued}
    assert after.core.requests[running].state is State.DISPATCHED
    assert after.core.requests[ended].state is State.QUEUED, "its failed attempt may be repeated"
    assert after.core.requests[ended].open_attempt == 2


def take_over(made: World) -> None:
    """The owner dies with all its effects done; another one takes its place."""
    made.begin_term()
    made.read_streams()
    for worker in made.workers:
        if worker.alive:
            worker.epoch = made.core.epoch
            made.feed(events.WorkerSeen(worker.beat()))
    made.feed(events.Recovered())
    made.run_pending()


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_takeover_knows_which_workers_a_request_has_ended(when: str) -> None:
    made = World()
    request_id = made.submit()
    first = made.ready_worker()
    made.run_pending()
    made.kill(first)
    if when == "waiting":
        take_over(made)
    second = made.ready_worker()
    made.run_pending()
    if when == "running":
        made.pull(second)
        take_over(made)
    assert made.core.accused.of(made.asked[request_id]).deaths == 1
    assert second.name in {item.worker for item in made.work.values()}
    made.kill(second)
    take_over(made)
    made.kill(made.ready_worker())
    take_over(made)
    assert ERROR.decode(made.frames[request_id][-1].data).code == "request_quarantined"
    assert request_id in made.quarantined and not made.core.requests and not made.work


def test_a_takeover_does_not_count_attempts_that_no_worker_held() -> None:
    """Attempt 1 was never pulled, 2 ended its worker, 3 runs after the takeover and ends another one."""
    made = World()
    request_id = made.submit()
    first = made.ready_worker()
    made.run_pending()
    first.alive = False
    made.silence()
    made.kill(made.ready_worker())
    last = made.ready_worker()
    made.run_pending()
    made.pull(last)
    take_over(made)
    request = made.core.requests[request_id]
    assert (request.attempt, made.core.accused.of(request.envelope).deaths) == (3, 1)
    made.kill(last)
    made.kill(made.ready_worker())
    assert request_id in made.quarantined


def test_a_takeover_adopts_an_attempt_whose_predecessor_it_had_adopted_before_it_reads_why() -> None:
    """The owner before us still stores the loss of attempt 1 and attempt 2, both after our first look at WORK."""
    made = World()
    request_id = made.submit()
    first = made.ready_worker()
    made.run_pending()
    made.pull(first)
    made.begin_term()
    ((seq, item),) = made.work.items()
    made.feed(events.WorkFound(item, seq))
    first.alive = False
    second = made.ready_worker()
    again = msgspec.structs.replace(item, attempt=2, worker=second.name)
    made.feed(events.WorkFound(again, seq + 1))
    assert not made.core.pool.workers[first.name].work, "the first worker has room again"
    died = {"engine_death": True, "accused": 1}
    lost = attempt_event(made, request_id, outcome="lost", worker=first.name, retryable=True, **died)
    made.feed(events.TerminalStored(lost))
    request = made.core.requests[request_id]
    assert (request.state, request.attempt, request.worker) == (State.DISPATCHED, 2, second.name)
    assert made.core.accused.of(request.envelope).deaths == 1


@pytest.mark.parametrize("ends", [2, 3])
def test_a_takeover_keeps_the_body_that_the_owner_before_it_does_not_delete(ends: int) -> None:
    """WORK still holds attempt 1, which is about to be deleted, and attempt 2; both have ended without a result.

    A third one may have ended, too, that WORK did not confirm and does not hold.
    """
    made = World()
    request_id = made.submit()
    worker = made.ready_worker()
    made.run_pending()
    ((seq, first),) = made.work.items()
    made.requests.clear()
    made.begin_term()
    for attempt in range(1, ends + 1):
        made.feed(events.TerminalStored(attempt_event(made, request_id, attempt=attempt, outcome="lost")))
    second = seq + 1
    made.work[second] = msgspec.structs.replace(first, attempt=2)
    for found in (seq, second):
        made.feed(events.WorkFound(made.work[found], found))
    del made.work[seq]
    made.run_pending()
    assert made.core.requests[request_id].work_seq == second and list(made.work) == [second]
    worker.epoch = made.core.epoch
    made.feed(events.WorkerSeen(worker.beat()))
    made.feed(events.Recovered())
    made.run_pending()
    assert [item.attempt for item in made.work.values()] == [ends + 1]


def test_a_withdrawn_attempt_of_a_live_worker_is_no_death() -> None:
    """WORK did not confirm what the worker holds: it is given again, and nobody is accused."""
    made = World()
    worker = made.ready_worker()
    request_id = made.submit()
    made.feed(
        events.WorkerSeen(
            msgspec.structs.replace(worker.beat(), in_flight=[Progress(request_id=request_id, attempt=1)])
        )
    )
    made.feed(events.WorkRefused(request_id, 1))
    made.run_pending()
    assert not made.attempts[(request_id, 1)].engine_death
    assert len(made.core.accused) == 0 and made.core.requests[request_id].attempt == 2


def test_work_that_is_found_before_its_worker_is_heard_takes_up_room_there() -> None:
    made = World()
    worker = made.ready_worker(slots=2)
    for _ in range(2):
        made.submit()
    made.run_pending()
    made.pull(worker)
    waiting = made.submit()
    take_over(made)
    assert made.core.pool.workers[worker.name].slots_reserved == 2
    assert made.core.requests[waiting].state is State.QUEUED


def test_what_workers_give_back_is_no_attempt() -> None:
    """One drains, another has no engine: the request goes on to a third, and not to one of them again."""
    made = World()
    first, second = made.ready_worker(), made.ready_worker()
    request_id = made.submit()
    for code in ("shutting_down", "unavailable"):
        made.run_pending()
        (item,) = made.work.values()
        worker = first if item.worker == first.name else second
        made.pull(worker)
        made.end(worker, worker.running.pop((request_id, item.attempt)), "failed", retryable=True, error_code=code)
    made.run_pending()
    request = made.core.requests[request_id]
    assert request.state is State.QUEUED and request.failures == 0, "neither was heard since"
    take_over(made)
    third = made.ready_worker()
    made.run_pending()
    assert made.core.requests[request_id].worker == third.name


def test_the_only_worker_gets_back_what_it_gave_back_once_it_is_heard() -> None:
    made = World()
    worker = made.ready_worker()
    request_id = made.submit()
    made.run_pending()
    made.pull(worker)
    made.end(worker, worker.running.pop((request_id, 1)), "failed", retryable=True, error_code="unavailable")
    made.run_pending()
    assert made.core.requests[request_id].state is State.QUEUED
    made.feed(events.LoopbackSeen())
    made.feed(events.WorkerSeen(worker.beat()))
    assert made.core.requests[request_id].worker == worker.name


def missed(made: World) -> str:
    """A request that its worker has ended, whose stored end the core is not told."""
    worker = made.ready_worker()
    request_id = made.submit()
    made.run_pending()
    made.pull(worker)
    made.end(worker, worker.running.pop((request_id, 1)), "completed")
    made.untold.clear()
    return request_id


def pass_until_settled(made: World, request_id: str) -> None:
    for _ in range(20):
        made.pass_time(500)
        if request_id not in made.core.requests:
            return
    raise AssertionError(f"{made.core.requests[request_id]} waits for its end")


@pytest.mark.parametrize("by", ["heartbeat", "cancel", "sweep"])
def test_an_end_that_was_not_told_is_looked_up(by: str) -> None:
    made = World()
    request_id = missed(made)
    if by == "cancel":
        made.feed(events.ControlAnswered(request_id, 1, ControlAnswer(status="ended")))
    elif by == "sweep":
        made.core.requests[request_id].was_in_flight = False
        made.feed(events.WorkSwept(frozenset(made.work), made.seq))
    pass_until_settled(made, request_id)
    tombstone = made.core.tombstones.ended(request_id)
    assert tombstone is not None and tombstone.event.outcome == "completed"
    assert made.core.mended == {"attempts": 1}


def test_what_work_holds_and_nobody_needs_is_deleted_and_counted() -> None:
    made = World()
    worker = made.ready_worker()
    made.submit()
    made.run_pending()
    ((seq, item),) = made.work.items()
    made.pull(worker)
    made.end(worker, worker.running.pop((item.request.request_id, 1)), "completed")
    made.run_pending()
    made.work[seq] = item
    made.read_work()
    made.run_pending()
    assert not made.work and made.core.mended == {"work": 1}


def test_an_attempt_that_vanished_without_an_end_is_lost_and_tried_again() -> None:
    made = World()
    worker = made.ready_worker()
    request_id = made.submit(stream=False)
    made.run_pending()
    made.pull(worker)
    worker.running.clear()
    while (request_id, 1) not in made.attempts:
        made.pass_time(500)
    assert made.attempts[(request_id, 1)].outcome == "lost"
    made.pass_time(500)
    assert made.core.requests[request_id].attempt == 2


def test_an_end_that_nobody_can_read_ends_the_request_once() -> None:
    made = World()
    request_id = missed(made)
    made.feed(events.EndUnreadable(request_id, 1))
    assert ERROR.decode(made.frames[request_id][-1].data).code == "internal_error"
    made.begin_term()
    made.feed(events.EndUnreadable("another", 1))
    later = made.submit(request_id="another")
    assert not made.answers[later].admitted, "it has ended"
    assert not made.core.requests


def test_a_takeover_counts_an_unreadable_end_before_the_present_attempt_as_a_death() -> None:
    made = World()
    request_id = made.submit()
    made.kill(made.ready_worker())
    second = made.ready_worker()
    made.run_pending()
    made.pull(second)
    made.begin_term()
    made.feed(events.EndUnreadable(request_id, 1))
    made.read_work()
    assert made.core.requests[request_id].attempt == 2
    assert made.core.accused.of(made.asked[request_id]).deaths == 1


def test_work_of_another_epoch_has_another_id_in_work() -> None:
    """Else what a deposed owner stores late would make the owner's dispatch a duplicate, which is thrown away."""
    made = World()
    made.ready_worker()
    made.submit()
    made.run_pending()
    (item,) = made.work.values()
    later = msgspec.structs.replace(item, epoch=Epoch(1, item.epoch.revision + 1))
    assert work_id(item) == work_id(msgspec.structs.replace(item)) != work_id(later)


def test_a_copy_of_a_request_that_failed_for_good_is_dropped() -> None:
    made = World()
    worker = made.ready_worker()
    request_id = made.submit()
    made.run_pending()
    made.pull(worker)
    worker.running[(request_id, 1)] = Progress(request_id=request_id, attempt=1, completion_tokens=1)
    made.kill(worker)
    errors = len(made.frames[request_id])
    made.publish(request_id)
    made.run_pending()
    assert not made.core.requests and not made.requests and len(made.frames[request_id]) == errors


def test_the_readme_draws_the_table_of_transitions() -> None:
    readme = (Path(__file__).parents[2] / "scheduler" / "README.md").read_text()
    assert f"```mermaid\n{mermaid()}\n```" in readme, "python -m scheduler.core.transitions prints the drawing"


def test_every_state_is_reached_and_left() -> None:
    assert {following for (_, _), following in TRANSITIONS.items()} == set(State) - {State.NEW}
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.SETTLED}
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)


def test_a_missing_transition_is_an_error_with_history() -> None:
    made = World()
    request_id = made.submit()
    with pytest.raises(InvalidTransition, match="admitted, attempt 0: stored"):
        made.core.requests[request_id].advance(Trigger.WORK_STORED, made.now)


def test_every_state_can_end() -> None:
    for state in State:
        if state not in (State.NEW, State.ENDING, State.SETTLED):
            assert (state, Trigger.END_PROPOSED) in TRANSITIONS


def test_a_worker_that_knows_a_higher_epoch_gets_nothing_and_makes_its_owner_rise() -> None:
    """The bus was restored from a backup: revisions are given again, and the worker refuses whoever comes with them."""
    made = World()
    worker = made.start_worker()
    worker.epoch = Epoch(EPOCH.era, EPOCH.revision + 5_000)
    assert events.RiseAbove(worker.epoch) in made.core.step(events.WorkerSeen(worker.beat()), made.now)
    request_id = made.submit()
    assert made.core.requests[request_id].state is State.QUEUED
    evicted = made.ready_worker()
    made.silence()
    assert evicted.name in made.core.pool.evicted
    evicted.epoch = worker.epoch
    assert events.RiseAbove(worker.epoch) in made.core.step(events.WorkerSeen(evicted.beat()), made.now)


def test_a_cancelled_attempt_that_only_its_worker_knows_is_stopped_and_not_billed() -> None:
    """The bus was restored from a backup: the attempt runs on, and its message is gone from the streams."""
    made = World()
    worker = made.ready_worker()
    worker.running["r-old", 1] = Progress(request_id="r-old", attempt=1, completion_tokens=3)
    assert not made.core.step(events.WorkerSeen(worker.beat()), made.now), "its stream goes on"
    made.feed(events.CancelAsked("t0", CancelRequest(request_id="r-old"), 0))
    order = CancelAttempt(epoch=EPOCH, request_id="r-old", attempt=1, reason="worker_lost")
    assert made.core.step(events.WorkerSeen(worker.beat()), made.now) == [events.SendControl(worker.name, order)]
