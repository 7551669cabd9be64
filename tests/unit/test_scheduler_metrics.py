"""The scheduler's figures are those of its core."""

from contracts.messages.control import CancelRequest
from contracts.messages.records import TenantLimits, TenantRecord
from scheduler.core import events
from scheduler.metrics import Collector
from tests.support.scheduler_world import World


def figures(made: World) -> dict[str, float]:
    """Samples by name and the labels beside the model's."""
    found = {}
    for family in Collector(lambda: [made.core]).collect():
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model") == "m"
            found["/".join([sample.name, *labels.values()])] = sample.value
    return found


def test_the_figures_follow_what_happens_to_requests_and_workers() -> None:
    made = World()
    made.feed(events.TenantChanged("t0", TenantRecord(name="t0", limits=TenantLimits(input_tpm=100))))
    worker = made.ready_worker(slots=1)
    running, waiting = made.submit(), made.submit()
    made.run_pending()
    assert not made.answers[made.submit(prompt_tokens=101)].admitted
    assert figures(made) == {
        "headrace_requests_waiting": 1,
        "headrace_requests_running": 1,
        "headrace_reserved_tokens": 40,
        "headrace_waiting_tokens": 20,
        "headrace_workers": 1,
        "headrace_lost_workers_total": 0,
        "headrace_refusals_total/request_exceeds_limit": 1,
    }
    made.feed(events.CancelAsked("t0", CancelRequest(request_id=waiting), None))
    made.kill(worker)
    found = figures(made)
    assert found["headrace_requests_ended_total/cancelled"] == 1
    assert (found["headrace_lost_workers_total"], found["headrace_workers"]) == (1, 0)
    assert (found["headrace_requests_waiting"], found["headrace_requests_running"]) == (1, 0), running
    assert (found["headrace_reserved_tokens"], found["headrace_waiting_tokens"]) == (20, 20)


def test_a_standby_shows_no_figures() -> None:
    assert not [sample for family in Collector(list).collect() for sample in family.samples]
