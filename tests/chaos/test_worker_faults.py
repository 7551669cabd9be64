"""Workers and engines that freeze, fail, hang or are poisoned, and workers that are told to stop."""

import asyncio
import json
import signal
import time

import pytest

from tests.support.cluster import Cluster, Service, counted
from tests.support.polling import until
from tests.support.stack import headrace

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTER = {"workers": 2, "sim_slots": 4, "sim_itl_ms": 20, "stall_s": 3, "grace_s": 3}


async def lost_within(cluster: Cluster, worker: Service) -> float:
    """Seconds until the scheduler no longer counts on the worker that was just stopped."""
    began = time.monotonic()

    async def gone() -> bool:
        queue = await cluster.queue()
        return queue is not None and len(queue.workers) == 1

    await until(gone, f"{worker.name} is declared lost")
    return time.monotonic() - began


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "gathered"])
async def test_before_the_first_token_another_worker_answers(cluster: Cluster, stream: bool) -> None:
    call = cluster.ask(stream=stream, simulate={"tokens": ["He", "llo"], "ttft_ms": 1500})
    (await cluster.busy_worker()).kill()
    await call.done()
    assert call.complete and call.text == "Hello", call.story()
    events = await cluster.ended(call.request_id, 2)
    assert [(event.outcome, event.billable) for event in events] == [("lost", False), ("completed", True)]


async def test_after_tokens_the_stream_ends_with_an_error_event(cluster: Cluster) -> None:
    call = cluster.ask(max_tokens=500)
    await call.shows(50)
    (await cluster.busy_worker()).kill()
    await call.done()
    assert call.endings == 1 and call.code == "worker_lost" and call.request_id in call.error["message"], call.story()
    assert counted(500).startswith(call.text) and 50 <= call.tokens < 500
    assert all(json.loads(data)["choices"][0]["finish_reason"] is None for data in call.data[:-1])
    (event,) = await cluster.ended(call.request_id)
    assert event.outcome == "lost" and event.completion_tokens > 0 and not event.billable


async def test_a_scheduler_that_stands_still_longer_than_silence_may_last_loses_no_worker(cluster: Cluster) -> None:
    """It heard nothing for 5 s, 3 would lose a worker; but it did not hear itself either."""
    before = await cluster.newest()
    calls = [cluster.ask(max_tokens=400) for _ in range(2)]
    for call in calls:
        await call.shows(2)
    (scheduler,) = cluster.schedulers
    scheduler.freeze()
    await asyncio.sleep(5)
    scheduler.thaw()
    for call in calls:
        await call.done()
        assert call.complete and call.text == counted(400), call.story()
    assert [event.outcome for event in await cluster.events_since(before)] == ["completed"] * 2


async def test_a_frozen_worker_that_wakes_up_changes_nothing(cluster: Cluster) -> None:
    """Its frames, acks and events come too late; it is told that it was evicted and rejoins under a new name."""
    before = await cluster.newest()
    evictions = {worker.name: worker.says("evicted") for worker in cluster.workers}
    streaming = cluster.ask(max_tokens=200)
    await streaming.shows(20)
    frozen = await cluster.busy_worker()
    gathered = [cluster.ask(stream=False, max_tokens=250, words=["x"] * 20) for _ in range(6)]
    await cluster.runs(7, 0)
    frozen.freeze()
    print(f"\ndeclared lost {await lost_within(cluster, frozen):.1f} s after it froze")
    await asyncio.sleep(2.5)
    frozen.thaw()
    await streaming.done()
    assert streaming.error["code"] == "worker_lost", streaming.story()
    assert counted(200).startswith(streaming.text) and 20 <= streaming.tokens < 200
    for call in gathered:
        await call.done()
        assert call.complete and call.text == counted(250), call.story()
    await until(lambda: frozen.says("evicted") == evictions[frozen.name] + 1, "it was told")
    await cluster.whole()
    events = await cluster.events_since(before)
    lost = [event for event in events if event.outcome == "lost"]
    completed = [event for event in events if event.outcome == "completed"]
    assert len({event.worker for event in lost}) == 1 and not any(event.billable for event in lost)
    assert sorted(event.request_id for event in completed) == sorted(call.request_id for call in gathered)
    assert sum(event.completion_tokens for event in completed) == 6 * 250


async def test_waiting_requests_of_a_dead_worker_have_their_first_token_elsewhere_within_5_s(cluster: Cluster) -> None:
    """Silence says nothing about a request: they are tried again at once, as slots come free."""
    calls = [cluster.ask(simulate={"tokens": ["a", "b", "c"], "ttft_ms": 300}) for _ in range(8)]
    await cluster.runs(8, 0)
    cluster.workers[0].kill()
    killed_at = time.monotonic()
    for call in calls:
        await call.done()
        assert call.complete and call.text == "abc", call.story()
    late = max(call.first_at for call in calls) - killed_at
    print(f"\nlast first token {late:.2f} s after the kill")
    assert late < 6
    events = [await cluster.events(call.request_id) for call in calls]
    assert sorted(len(of_one) for of_one in events) == [1] * 4 + [2] * 4
    for of_one in events:
        assert [event.outcome for event in of_one] in (["completed"], ["lost", "completed"])
        assert [event.billable for event in of_one].count(True) == 1


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "gathered"])
async def test_an_engine_failure_before_the_first_token_is_tried_once_more(cluster: Cluster, stream: bool) -> None:
    call = await cluster.ask(stream=stream, simulate={"tokens": ["a"], "fail_after": 0}).done()
    assert (call.status, call.endings) == (500, 1) and '"engine_error"' in call.data[0], call.story()
    events = await cluster.ended(call.request_id, 2)
    assert [(event.outcome, event.attempt, event.billable) for event in events] == [
        ("failed", 1, False),
        ("failed", 2, False),
    ]


async def test_an_engine_failure_after_tokens_ends_the_stream(cluster: Cluster) -> None:
    call = await cluster.ask(max_tokens=20, simulate={"fail_after": 10}).done()
    assert call.endings == 1 and call.error["code"] == "engine_error", call.story()
    assert call.text == counted(10) and call.error["request_id"] == call.request_id
    (event,) = await cluster.ended(call.request_id)
    assert (event.outcome, event.completion_tokens, event.billable) == ("failed", 10, False)


async def test_an_engine_failure_after_tokens_is_hidden_from_a_caller_who_has_seen_none(cluster: Cluster) -> None:
    call = await cluster.ask(stream=False, max_tokens=20, simulate={"fail_after": 10}).done()
    assert call.status == 500, call.story()  # It fails each time: two attempts, then an error.
    assert [event.outcome for event in await cluster.ended(call.request_id, 2)] == ["failed", "failed"]


async def test_a_generation_that_hangs_is_given_up_and_its_neighbours_go_on(cluster: Cluster) -> None:
    neighbours = [cluster.ask(max_tokens=350) for _ in range(2)]
    for call in neighbours:
        await call.shows(5)
    began = time.monotonic()
    hung = await cluster.ask(max_tokens=20, simulate={"hang_after": 5}).done()
    print(f"\ngiven up {time.monotonic() - began:.1f} s after it began; the limit is 3 s")
    assert hung.error["code"] == "engine_error" and hung.text == counted(5), hung.story()
    for call in neighbours:
        await call.done()
        assert call.complete and call.text == counted(350), call.story()


async def test_an_engine_that_hangs_is_built_anew(cluster: Cluster) -> None:
    before = sum([await worker.metric("headrace_worker_engine_losses_total") for worker in cluster.workers])
    hung = await cluster.ask(max_tokens=20, simulate={"hang_after": 5}).done()
    assert hung.error["code"] == "engine_error" and hung.text == counted(5), hung.story()
    (event,) = await cluster.ended(hung.request_id)
    assert event.engine_death and event.outcome == "failed" and not event.billable
    losses = sum([await worker.metric("headrace_worker_engine_losses_total") for worker in cluster.workers])
    assert losses == before + 1
    await cluster.all_ready()
    calls = [await cluster.ask(max_tokens=2).done() for _ in range(4)]
    assert all(call.complete for call in calls)


async def test_poison_is_quarantined_and_those_who_shared_its_batch_are_answered(cluster: Cluster) -> None:
    """Each worker is started again when it has died, as a supervisor does."""
    keeper = asyncio.create_task(keep_up(cluster))
    try:
        innocent = [cluster.ask(stream=False, max_tokens=150, words=["x"] * 9) for _ in range(4)]
        await cluster.runs(4, 0)
        simulate = {"exit_after": 0, "ttft_ms": 600, "tokens": ["x"]}
        poison = cluster.ask(stream=False, simulate=simulate, words=["bad", "words"])
        await poison.done()
        assert poison.status == 500 and '"request_quarantined"' in poison.data[0], poison.story()
        for call in innocent:
            await call.done()
            assert call.complete and call.text == counted(150), call.story()
        events = await cluster.ended(poison.request_id, 3)
        assert [event.outcome for event in events] == ["lost"] * 3
        assert not any(event.billable for event in events)
        for call in innocent:
            assert [event.billable for event in await cluster.events(call.request_id)].count(True) == 1
        await quarantine_commands(cluster, poison.request_id)
    finally:
        keeper.cancel()


async def test_poison_that_kills_at_once_takes_three_workers_and_no_more(cluster: Cluster) -> None:
    """No heartbeat told that the worker held it; that the bus had delivered it counts."""
    keeper = asyncio.create_task(keep_up(cluster))
    try:
        poison = await cluster.ask(stream=False, simulate={"exit_after": 0, "tokens": ["x"]}).done()
        ended_at = time.monotonic()
        assert poison.status == 500 and '"request_quarantined"' in poison.data[0], poison.story()
        print(f"\nquarantined after {ended_at - poison.asked_at:.1f} s")
        events = await cluster.events(poison.request_id)
        assert [(event.outcome, event.engine_death) for event in events] == [("lost", True)] * 3
    finally:
        keeper.cancel()


async def keep_up(cluster: Cluster) -> None:
    while True:
        for worker in cluster.workers:
            if not worker.alive:
                worker.start()
        await asyncio.sleep(0.2)


async def quarantine_commands(cluster: Cluster, request_id: str) -> None:
    """What a person sees of it, and how it is dropped."""

    def command(*arguments: str) -> str:
        done = headrace("quarantine", *arguments, **cluster.environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert request_id in await asyncio.to_thread(command, "list")
    shown = await asyncio.to_thread(command, "show", request_id)
    assert "ended 3 workers or engines" in shown and "bad words" not in shown, "nobody asked for bodies"
    await asyncio.to_thread(command, "drop", request_id)
    assert request_id not in await asyncio.to_thread(command, "list")
    gone = await asyncio.to_thread(headrace, "quarantine", "drop", request_id, **cluster.environment)
    assert gone.returncode == 1 and "not in quarantine" in gone.stderr


async def test_a_worker_that_is_told_to_stop_finishes_what_it_can(cluster: Cluster) -> None:
    """Short answers finish, long ones end with an error after the grace time (3 s), what never began moves on."""
    short = [cluster.ask(max_tokens=60) for _ in range(4)]
    long = [cluster.ask(max_tokens=400) for _ in range(4)]
    for call in [*short, *long]:
        await call.shows(1)
    stopped = cluster.workers[0]
    stopped.signal(signal.SIGTERM)
    waiting = [cluster.ask(max_tokens=2) for _ in range(4)]
    began = time.monotonic()
    assert await stopped.exited(10) == 0
    print(f"\nended {time.monotonic() - began:.1f} s after SIGTERM; the grace time is 3 s")
    for call in [*short, *waiting]:
        await call.done()
        assert call.complete and call.text == counted(call.body["max_tokens"]), call.story()
    for call in long:
        await call.done()
        assert call.endings == 1 and counted(400).startswith(call.text)
        assert call.complete or call.error["code"] == "shutting_down", call.story()
    assert sum(call.complete for call in long) < 4
    for call in [*short, *long, *waiting]:
        assert [event.billable for event in await cluster.events(call.request_id)].count(True) == int(call.complete)


async def test_a_loaded_event_loop_is_no_dead_worker(cluster: Cluster) -> None:
    """Pauses of 2 s, again and again: heartbeats come late and nobody is lost."""
    before = await cluster.newest()
    calls = [cluster.ask(max_tokens=250) for _ in range(6)]
    for call in calls:
        await call.shows(1)
    for _ in range(2):
        for service in [*cluster.workers, cluster.schedulers[0]]:
            service.freeze()
        await asyncio.sleep(2)
        for service in [*cluster.workers, cluster.schedulers[0]]:
            service.thaw()
        await asyncio.sleep(0.5)
    for call in calls:
        await call.done()
        assert call.complete and call.text == counted(250), call.story()
    assert not [event for event in await cluster.events_since(before) if event.outcome == "lost"]
