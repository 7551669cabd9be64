"""The deadline to the first token counts prompts that wait in an engine, at admission and at dispatch."""

import msgspec
import pytest

from contracts.messages.control import Progress
from contracts.messages.frames import ErrorData
from scheduler.core import events
from scheduler.core.prompts import BEHIND_TOKENS, Prompts
from scheduler.core.transitions import State
from tests.support.scheduler_world import FakeWorker, World

LONG = 20_000
"""Tokens of a prompt; the workers here compute 10 in a millisecond."""
TAKES_MS = 2_000


def measured() -> Prompts:
    """Three prompts, one after the other."""
    prompts = Prompts()
    for name in "abc":
        prompts.came(name, LONG, 0)
    for number, name in enumerate("abc", 1):
        prompts.left(name, number * TAKES_MS, computed=True)
    assert prompts.per_ms == 10
    return prompts


def test_what_is_left_of_the_first_prompt_is_told_by_its_time() -> None:
    prompts = measured()
    assert prompts.first_token_ms(LONG, 50_000) == TAKES_MS
    prompts.came("d", LONG, 50_000)
    assert [prompts.first_token_ms(10, 50_000 + after) for after in (0, 500, 2_000, 9_000)] == [2_001, 1_501, 1, 1]


@pytest.mark.parametrize(
    ("tokens", "took_ms", "computed"),
    [(2_000, 5_000, True), (LONG, 1_900, True), (LONG, 5_000, False)],
    ids=["too few, something else took the time", "too short for heartbeats", "ended before its first token"],
)
def test_what_says_nothing_of_speed_is_no_measure(tokens: int, took_ms: int, *, computed: bool) -> None:
    prompts = Prompts()
    prompts.came("a", tokens, 0)
    prompts.left("a", took_ms, computed=computed)
    assert prompts.per_ms == 0 == prompts.first_token_ms(10**6, took_ms)


def test_an_idle_time_is_no_slow_one() -> None:
    prompts = measured()
    prompts.came("d", LONG, 10**6)
    prompts.left("d", 10**6 + TAKES_MS, computed=True)
    assert prompts.per_ms == pytest.approx(10)


def test_one_is_computed_and_two_seconds_of_others_wait_behind_it() -> None:
    """What is short may pass a giant in some engines, and waits nowhere better in others."""
    prompts, enough = measured(), []
    for name, tokens in (("giant", 10**6), ("d", LONG), ("e", 1)):
        prompts.came(name, tokens, 0)
        enough.append(prompts.enough)
    prompts.left("giant", 100_000, computed=True)
    assert [*enough, prompts.enough] == [False, False, True, False]


def test_short_prompts_are_never_too_many_and_neither_is_what_was_not_measured() -> None:
    slow, unknown = Prompts(), Prompts()
    slow.came("a", LONG, 0)
    slow.left("a", 100_000, computed=True)
    for number in range(60):
        unknown.came(str(number), LONG, 0)
        if slow.tokens < BEHIND_TOKENS:
            slow.came(str(number), 200, 0)
    assert not slow.enough and not unknown.enough


class Computing(World):
    """Its workers compute one prompt after the other, and are heard each 500 ms."""

    def __init__(self, workers: int = 1) -> None:
        super().__init__()
        self.free_at: dict[str, int] = {}
        self.due: dict[tuple[str, int], int] = {}
        for _ in range(workers):
            self.ready_worker(slots=64, kv_tokens=10**9)

    def live(self, span_ms: int) -> None:
        for _ in range(span_ms // 500):
            self.now += 500
            self.run_pending()
            for worker in self.workers:
                self.compute(worker)
            self.feed(events.LoopbackSeen())
            self.feed(events.TimePassed())
        self.run_pending()

    def compute(self, worker: FakeWorker) -> None:
        self._take_work(worker)
        for key, progress in list(worker.running.items()):
            if key not in self.due:
                prompt = self.asked[key[0]].prompt_tokens
                begins = max(self.now, self.free_at.get(worker.name, 0))
                self.free_at[worker.name] = self.due[key] = begins + prompt // 10
            if self.due[key] <= self.now and not progress.completion_tokens:
                worker.running[key] = msgspec.structs.replace(progress, completion_tokens=1)
        self.feed(events.WorkerSeen(worker.beat()))
        for progress in list(worker.running.values()):
            if progress.completion_tokens:
                self.end(worker, progress, "completed", first_token_at_ms=self.now)

    def long(self, **fields: object) -> str:
        return self.submit(**{"prompt_tokens": LONG, "tenant": "t2", "deadline_ms": 60_000} | fields)

    def measure(self) -> None:
        for _ in range(6):
            self.long()
        self.live(20_000)
        assert not self.core.requests
        assert all(worker.load.prompts.per_ms > 5 for worker in self.core.pool.workers.values())


def test_prompts_wait_here_and_not_in_the_engine() -> None:
    made = Computing()
    made.measure()
    for _ in range(20):
        made.long()
    made.run_pending()
    held = [request for request in made.core.requests.values() if request.state is State.QUEUED]
    assert len(held) in (17, 18), "one is computed, and one or two wait behind it"
    short = made.submit(tenant="t1")
    made.live(10_000)
    assert short not in made.core.requests, "it goes next by fairness, with 34 s of others before it in the line"
    made.live(60_000)
    assert not made.core.requests
    assert {event.outcome for event in made.attempts.values()} == {"completed"}


def test_whose_first_token_cannot_come_in_time_is_refused_at_once() -> None:
    made = Computing()
    made.measure()
    asked = [made.long(deadline_ms=15_000) for _ in range(40)]
    refused = [made.answers[each] for each in asked if not made.answers[each].admitted]
    assert refused
    assert {answer.code for answer in refused} == {"overloaded"} and all(answer.retry_after_s for answer in refused)


def test_a_prompt_that_takes_longer_than_its_deadline_says_so() -> None:
    made = Computing()
    made.measure()
    answer = made.answers[made.ask(prompt_tokens=10**6, tenant="t2", deadline_ms=30_000)]
    assert (answer.admitted, answer.code, answer.retry_after_s) == (False, "deadline_exceeded", None)
    assert "ask for a longer deadline" in answer.message
    assert made.answers[made.ask(prompt_tokens=10**6, tenant="t2", deadline_ms=300_000)].admitted


def test_what_a_worker_could_not_begin_in_time_is_not_dispatched() -> None:
    """It took long to be stored."""
    made = Computing()
    made.measure()
    late = made.ask(prompt_tokens=3 * LONG, tenant="t2", deadline_ms=7_000)
    assert made.answers[late].admitted
    made.now += 1_100
    made.publish(late)
    made.live(1_000)
    event = made.attempts[late, 0]
    assert (event.outcome, event.error_code, event.spent_input_tokens) == ("expired", "deadline_exceeded", 0)
    error = msgspec.json.decode(made.frames[late][-1].data, type=ErrorData)
    assert "No first token is expected within the deadline" in error.message


def test_an_adopted_attempt_measures_nothing() -> None:
    made = Computing()
    ids = [made.long() for _ in range(3)]
    made.run_pending()
    made.pull(made.workers[0])
    made.takeover()
    for request_id in ids:
        progress = Progress(request_id=request_id, attempt=1, completion_tokens=1)
        made.workers[0].running[request_id, 1] = progress
    made.now += 3_000
    made.feed(events.WorkerSeen(made.workers[0].beat()))
    [worker] = made.core.pool.workers.values()
    assert worker.load.prompts.tokens == 0 == worker.load.prompts.per_ms
