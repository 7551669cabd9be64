"""A worker or a gateway that is alive and late: slow, not lost; given up only when it stands still for long."""

import pytest

from contracts.messages.base import Epoch
from contracts.messages.control import StreamOwnerHeartbeat, WorkerPulse
from scheduler.core import events
from tests.support.scheduler_world import FakeWorker, World


def live(made: World, worker: FakeWorker, seconds: float, *, lag_ms: int = 0, engine_idle_ms: int = 0) -> None:
    """The worker sends pulses, and no heartbeat; a lag of -1 grows with the time. The others stay as they are."""
    for beat in range(round(seconds * 2)):
        made.now += 500
        lag = 500 * (beat + 1) if lag_ms < 0 else lag_ms
        pulse = WorkerPulse(worker=worker.name, lag_ms=lag, engine_idle_ms=engine_idle_ms)
        made.feed(events.PulseSeen(pulse))
        for other in made.workers:
            if other is not worker and other.name in made.core.pool.workers:
                slow = made.core.pool.workers[other.name].slow_since_ms > 0
                sign = events.PulseSeen(WorkerPulse(worker=other.name, lag_ms=2_000)) if slow else None
                made.feed(sign or events.WorkerSeen(other.beat()))
        made.feed(events.LoopbackSeen())
        made.feed(events.TimePassed())
    made.run_pending()


def running(made: World, worker: FakeWorker) -> str:
    request_id = made.submit()
    made.run_pending()
    made.pull(worker)
    return request_id


def test_a_worker_that_stands_still_for_seconds_keeps_its_work_and_gets_no_more() -> None:
    made = World()
    slow = made.ready_worker(slots=2)
    request_id = running(made, slow)
    live(made, slow, 10, lag_ms=-1)
    assert slow.name in made.core.pool.workers and request_id in made.core.requests
    other = made.ready_worker(slots=2)
    following = [made.submit() for _ in range(2)]
    made.run_pending()
    assert {made.core.requests[each].worker for each in following} == {other.name}, "though that one is fuller"


def test_a_worker_that_stands_still_for_too_long_is_given_up() -> None:
    made = World()
    slow, _ = made.ready_worker(), made.ready_worker(slots=2)
    request_id = running(made, slow)
    live(made, slow, 29, lag_ms=-1)
    assert made.core.pool.workers[slow.name].work and not made.core.lost_workers
    live(made, slow, 4, lag_ms=30_000)
    assert slow.name in made.core.pool.evicted
    assert "stood still" in made.attempts[request_id, 1].error_message


def test_silence_is_loss_as_ever_also_of_a_slow_worker() -> None:
    made = World()
    slow = made.ready_worker()
    running(made, slow)
    live(made, slow, 2, lag_ms=-1)
    made.silence(7)
    assert slow.name in made.core.pool.evicted


def test_while_all_are_slow_new_requests_are_refused_for_as_long_as_that_has_lasted() -> None:
    made = World()
    first, second = made.ready_worker(), made.ready_worker()
    live(made, first, 1, lag_ms=2_000)
    assert made.answers[made.ask()].admitted, "the second one is not slow"
    live(made, second, 6, lag_ms=2_000)
    answer = made.answers[made.ask()]
    assert (answer.admitted, answer.code, answer.retry_after_s) == (False, "overloaded", 6)
    live(made, first, 0.5)
    assert made.answers[made.ask()].admitted


def test_no_worker_at_all_is_no_slow_one() -> None:
    made = World()
    assert made.answers[made.ask()].admitted, "it waits for one"


@pytest.mark.parametrize(("idle_ms", "placed"), [(9_000, True), (11_000, False)])
def test_an_engine_without_a_step_gets_no_more(idle_ms: int, placed: bool) -> None:
    made = World()
    worker = made.ready_worker(slots=2)
    running(made, worker)
    live(made, worker, 0.5, engine_idle_ms=idle_ms)
    assert made.answers[made.ask()].admitted is placed
    assert worker.name in made.core.pool.workers


def test_what_waits_is_placed_when_the_worker_is_on_time_again() -> None:
    made = World()
    worker = made.ready_worker()
    request_id = made.ask()
    live(made, worker, 1, lag_ms=3_000)
    made.publish(request_id)
    live(made, worker, 3, lag_ms=3_000)
    assert not made.work
    live(made, worker, 0.5)
    assert len(made.work) == 1


def test_a_slow_worker_may_acknowledge_a_new_owner_late() -> None:
    made = World()
    slow = made.ready_worker()
    running(made, slow)
    made.begin_term(Epoch(1, 9))
    made.read_streams()
    live(made, slow, 12, lag_ms=-1)
    assert made.core.pool.unacknowledged() and slow.name in made.core.pool.workers
    live(made, slow, 6.5)
    assert slow.name in made.core.pool.evicted, "now it could, and does not"


def test_work_that_waits_for_a_worker_to_come_round_is_not_taken_for_lost() -> None:
    """Whether it reached its worker is known only some time after the worker has gone on."""
    made = World()
    slow = made.ready_worker()
    request_id = made.submit()
    live(made, slow, 20, lag_ms=-1)
    for second in range(16):
        assert second > 14 or not made.attempts, second
        live(made, slow, 1)
        made.feed(events.WorkerSeen(slow.beat()))
    assert "did not reach its worker" in made.attempts[request_id, 1].error_message


def test_a_gateway_that_stands_still_keeps_its_requests_until_it_is_given_up() -> None:
    made = World()
    request_id = made.submit(stream_owner="g1")
    for lag_ms in range(0, 30_000, 500):
        made.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner="g1", lag_ms=lag_ms)))
        made.silence(1)
    assert not made.core.requests[request_id].cancel_reason
    for lag_ms in range(30_000, 34_000, 500):
        made.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner="g1", lag_ms=lag_ms)))
        made.silence(1)
    assert request_id not in made.core.requests
