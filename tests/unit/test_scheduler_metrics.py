"""What the scheduler shows to Prometheus of the models that it owns."""

import msgspec

from contracts.messages.records import TenantRecord
from scheduler.core import events
from scheduler.metrics import Collector, count_dispatch
from tests.support.polling import metric
from tests.support.scheduler_world import World


def shown(world: World) -> dict[tuple[str, ...], float]:
    """Name and label values -> value."""
    families = Collector(lambda: [world.core], 0.5).collect()
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_all_figures_of_a_model() -> None:
    world = World()
    first, second = world.ready_worker(), world.ready_worker()
    for _ in range(3):
        world.submit(prompt_tokens=10, max_output_tokens=20)
    world.feed(events.TenantChanged("t9", TenantRecord(name="t9", priorities=("batch",))))
    world.ask(tenant="t9")
    world.run_pending()
    for worker in (first, second):
        world.pull(worker)
    world.end(first, first.running.pop(next(iter(first.running))), "completed")
    world.run_pending()
    ((seq, item), *_) = world.work.items()
    world.feed(
        events.WorkFound(
            msgspec.structs.replace(item, request=msgspec.structs.replace(item.request, request_id="nobody's")), seq + 1
        )
    )
    second.alive = False
    for _ in range(8):
        world.now += 500
        world.feed(events.WorkerSeen(first.beat()))
        world.feed(events.LoopbackSeen(world.now - 2_500))
    assert shown(world) == {
        ("headrace_requests_waiting", "m"): 0,
        ("headrace_requests_running", "m"): 2,
        ("headrace_reserved_tokens", "m"): 60,
        ("headrace_waiting_tokens", "m"): 0,
        ("headrace_workers", "m"): 1,
        ("headrace_ready_workers", "m"): 1,
        ("headrace_slots", "m"): first.slots,
        ("headrace_kv_tokens", "m"): first.kv_tokens,
        ("headrace_kv_tokens_used", "m"): 0,
        ("headrace_prefix_blocks", "m"): 0,
        ("headrace_prefix_gaps_total", "m"): 0,
        ("headrace_prefix_prompt_tokens_total", "m"): 0,
        ("headrace_prefix_expected_tokens_total", "m"): 0,
        ("headrace_prefix_cached_tokens_total", "m"): 0,
        ("headrace_heartbeat_age_seconds", "m"): 0.5,
        ("headrace_lost_workers_total", "m"): 1,
        ("headrace_refusals_total", "m", "permission_denied"): 1,
        ("headrace_refusals_total", "m", "overloaded"): 0,
        ("headrace_refusals_total", "m", "rate_limit_exceeded"): 0,
        ("headrace_mended_total", "m", "work"): 1,
        ("headrace_requests_ended_total", "m", "completed"): 1,
        ("headrace_clock_skew_seconds", "m", "s"): -2.5,
    }


def test_wanted_workers_are_shown_once_they_are_known() -> None:
    world = World()
    world.ready_worker()
    assert ("headrace_desired_replicas", "m") not in shown(world)
    for _ in range(10):
        world.now += 500
        world.feed(events.LoopbackSeen(world.now))
        world.feed(events.TimePassed())
    figures = shown(world)
    assert figures["headrace_desired_replicas", "m"] == 1
    assert figures["headrace_needed_replicas", "m", "running"] == 0


def test_dispatches_are_timed_and_repetitions_counted() -> None:
    world = World()
    world.ready_worker()
    world.submit()
    world.run_pending()
    [item] = world.work.values()
    names = ("headrace_request_queue_time_seconds_count", "headrace_request_queue_time_seconds_sum")
    labels = {"model": "m", "version": item.version, "priority": "interactive", "workload": "short"}
    before = [metric(name, **labels) for name in names], metric("headrace_retries_total", model="m")
    late = msgspec.structs.replace(item, dispatched_at_ms=item.request.admitted_at_ms + 1_500)
    for each in (late, msgspec.structs.replace(late, attempt=2)):
        count_dispatch(each)
    after = [metric(name, **labels) for name in names], metric("headrace_retries_total", model="m")
    assert [new - old for old, new in zip(before[0], after[0], strict=True)] == [1, 1.5]
    assert after[1] - before[1] == 1


def test_a_standby_shows_no_model() -> None:
    families = Collector(list, 0.5).collect()
    assert not any(family.samples for family in families)
