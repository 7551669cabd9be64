"""Of what engines die: how a death is put down, who is tried again beside whom, and who never again."""

import math
import random
from typing import Any

import msgspec
import pytest

from contracts.accusations import Exposed, put_down_to
from contracts.messages.attempts import AttemptEvent
from contracts.messages.frames import ErrorData
from contracts.messages.records import TenantRecord
from scheduler.core import events
from scheduler.core.accused import ENGINES_MAX, KEPT_MAX, KEPT_MS, Accused, Body
from scheduler.core.transitions import State
from tests.support.scheduler_world import TOKENS, FakeWorker, World

ERROR = msgspec.json.Decoder(ErrorData)


def suspect(body: str) -> Exposed:
    return Exposed(body, suspect=True)


def other(body: str) -> Exposed:
    return Exposed(body, suspect=False)


def test_a_death_is_put_down_to_the_suspects_and_without_any_to_all() -> None:
    assert put_down_to({1: other("a"), 2: other("b")}) == {1: 2, 2: 2}
    assert put_down_to({1: other("a"), 2: suspect("b"), 3: suspect("c")}) == {1: 0, 2: 2, 3: 2}
    assert put_down_to({1: other("a"), 2: other("a"), 3: other("b")}) == {1: 2, 2: 0, 3: 2}, "copies count as one"
    assert put_down_to(dict[int, Exposed]()) == {}


def death(number: int = 1, *, accused: int, silent: bool = False, **fields: Any) -> AttemptEvent:
    known: dict[str, Any] = {
        "request_id": "r", "attempt": number, "tenant": "t", "key_id": "k", "model": "m", "version": "v1",
        "endpoint": "chat/completions", "priority": "interactive", "outcome": "lost" if silent else "failed",
        "reporter": "scheduler" if silent else "worker", "engine_death": True, "accused": accused,
        "body_hash": "h",
    }  # fmt: skip
    return AttemptEvent(**known | fields)


def after(*deaths: AttemptEvent) -> Body:
    body = Body()
    for event in deaths:
        body.died(event)
    return body


SILENT = death(accused=1, silent=True)
ALONE = death(accused=1)
AMONG_16 = death(accused=16)


def test_silence_says_nothing_and_the_second_death_isolates() -> None:
    assert not after(SILENT).suspect
    again = after(SILENT, SILENT)
    assert (again.suspect, again.together, again.condemned) == (True, 1, False)
    assert after(SILENT, SILENT, SILENT).condemned


def test_an_engine_that_dies_under_its_worker_accuses() -> None:
    first = after(AMONG_16)
    assert (first.suspect, first.together, first.condemned) == (True, 4, False)
    second = after(AMONG_16, death(accused=4))
    assert (second.suspect, second.together, second.condemned) == (True, 1, False)


def test_who_died_as_the_only_suspect_or_a_third_time_is_condemned() -> None:
    assert not after(ALONE).condemned, "an engine may die by itself, too"
    assert after(ALONE, ALONE).condemned
    assert after(AMONG_16, SILENT).condemned, "it was the only suspect of that worker"
    assert after(SILENT, ALONE).condemned
    assert after(AMONG_16, death(accused=4), death(accused=4)).condemned


def test_a_suspect_is_cleared_when_it_has_got_further_than_where_it_died() -> None:
    assert after(death(accused=2, completion_tokens=7)).suspect_tokens == 8
    assert after(SILENT, death(accused=2, completion_tokens=7)).suspect_tokens > 60, "a lost worker told too little"


def test_an_end_counts_once_and_an_answer_clears() -> None:
    known, made = Accused(), World()
    asked = made.asked[made.ask(tenant="t", body_hash="h")]
    for _ in range(2):
        known.take(AMONG_16, AMONG_16, 0)
    assert known.of(asked).deaths == 1
    done = death(2, accused=0, outcome="completed", engine_death=False)
    known.take(done, done, 0)
    assert not known.of(asked).suspect and len(known) == 0


def test_bodies_are_kept_ten_minutes_or_while_a_request_is_open_and_are_bounded() -> None:
    known = Accused()
    kept, gone = death(accused=1, body_hash="kept"), death(accused=1, body_hash="gone")
    known.take(kept, kept, 0)
    known.take(gone, gone, 0)
    made = World()
    made.submit(request_id="open", tenant="t", body_hash="kept")
    known.pass_time(KEPT_MS - 1, [])
    assert len(known) == 2
    known.pass_time(KEPT_MS, [request.envelope for request in made.core.requests.values()])
    assert len(known) == 1
    for number in range(KEPT_MAX + 10):
        event = death(accused=1, body_hash=str(number))
        known.take(event, event, KEPT_MS)
    assert len(known) == KEPT_MAX


# Requests, workers and time ---------------------------------------------------------------------------------


class Hold(World):
    """Workers that a supervisor starts again. ``poison``: hashes of bodies, and after how many tokens they kill.

    ``silent``: they end the whole worker, not its engine alone.
    """

    def __init__(self, *, workers: int, slots: int, poison: dict[str, int], silent: bool) -> None:
        super().__init__()
        self.feed(events.TenantChanged("t0", TenantRecord(name="t0")))
        self.poison = poison
        self.silent = silent
        self.slots = slots
        self.deaths = 0
        self.slow = 0
        """Ticks in which no engine gives anything."""
        self.first_token: dict[str, int] = {}
        for _ in range(workers):
            self.ready_worker(slots, 1_000_000)

    def ask(self, **fields: object) -> str:
        return super().ask(**{"deadline_ms": 3_600_000} | fields)

    def tick(self) -> None:
        """Half a second: a token of each attempt that runs."""
        self.now += 500
        self.slow -= 1
        self.run_pending()
        for worker in [worker for worker in self.workers if worker.alive]:
            self._take_work(worker)
            self._step_engine(worker)
            if worker.alive and not worker.evicted:
                self.feed(events.WorkerSeen(worker.beat()))
        self.run_pending()
        self.feed(events.LoopbackSeen())
        self.feed(events.TimePassed())
        self.run_pending()

    def _step_engine(self, worker: FakeWorker) -> None:
        if self.slow > 0:
            return
        bodies = {it.request.request_id: it.request.body_hash for it in self.work.values()}
        for (request_id, _), progress in worker.running.items():
            if self.poison.get(bodies[request_id], math.inf) <= progress.completion_tokens:
                self.deaths += 1
                if self.silent:
                    worker.alive = False
                    self.start_worker(self.slots, 1_000_000)
                else:
                    self.crash(worker)
                return
        for key, progress in list(worker.running.items()):
            self.first_token.setdefault(key[0], self.now)
            if progress.completion_tokens >= TOKENS:
                del worker.running[key]
                self.end(worker, progress, "completed")
            else:
                tokens = progress.completion_tokens + 1
                worker.running[key] = msgspec.structs.replace(progress, completion_tokens=tokens)

    def take_over(self) -> None:
        self.run_pending()
        self.begin_term()
        self.feed(events.TenantChanged("t0", TenantRecord(name="t0")))
        self.read_streams()
        for _ in range(16):
            self.tick()
        assert not self.core.pool.unacknowledged()
        self.read_work()
        self.read_ends()
        self.feed(events.Recovered())
        self.run_pending()

    def play(self, ticks: int = 600) -> None:
        for _ in range(ticks):
            if not self.core.requests and not self.pending:
                return
            self.tick()
        raise AssertionError(f"never quiet: {[str(request) for request in self.core.requests.values()]}")

    def outcome(self, request_id: str) -> str:
        ends = [event for (found, _), event in sorted(self.attempts.items()) if found == request_id]
        if ends and ends[-1].outcome == "completed":
            return "completed"
        return ERROR.decode(self.frames[request_id][-1].data).code


@pytest.mark.parametrize("silent", [True, False], ids=["the worker dies", "the engine dies"])
@pytest.mark.parametrize("kills_after", [0, 2])
@pytest.mark.parametrize("copies", [False, True], ids=["each its own body", "copies of one body"])
def test_a_hold_of_three_workers_loses_three_engines_and_answers_all_neighbours(
    silent: bool, kills_after: int, copies: bool
) -> None:
    made = Hold(workers=3, slots=8, poison={"bad": kills_after}, silent=silent)
    good = [made.submit(body_hash="good" if copies else f"good {n}", stream=False) for n in range(10)]
    bad = made.submit(body_hash="bad", stream=False)
    good += [made.submit(body_hash="good" if copies else f"good {n}", stream=False) for n in range(10, 20)]
    made.play()
    assert {made.outcome(request_id) for request_id in good} == {"completed"}
    assert made.outcome(bad) == "request_quarantined" and list(made.quarantined) == [bad]
    assert made.deaths <= ENGINES_MAX
    for _ in range(3):  # As an SDK does.
        again = made.submit(body_hash="bad", stream=False)
        made.play()
        assert made.answers[again].code == "request_quarantined"
    assert made.submit(body_hash="bad", tenant="t2", stream=False) in made.core.requests, "each tenant for itself"


@pytest.mark.parametrize("silent", [True, False], ids=["the worker dies", "the engine dies"])
def test_a_caller_that_repeats_what_fails_in_mid_stream_ends_three_engines(silent: bool) -> None:
    made = Hold(workers=3, slots=8, poison={"bad": 2}, silent=silent)
    codes = []
    for _ in range(6):
        request_id = made.submit(body_hash="bad", stream=True)
        made.play()
        codes.append(made.answers[request_id].code or made.outcome(request_id))
    assert made.deaths <= ENGINES_MAX and codes[-3:] == ["request_quarantined"] * 3
    made.now += KEPT_MS
    made.feed(events.TimePassed())
    assert made.answers[made.submit(body_hash="bad")].admitted, "not for ever"


def test_copies_that_wait_when_their_body_is_condemned_are_not_run() -> None:
    made = Hold(workers=2, slots=1, poison={"bad": 0}, silent=False)
    copies = [made.submit(body_hash="bad", stream=False) for _ in range(8)]
    made.play()
    assert made.deaths <= ENGINES_MAX
    assert {made.outcome(request_id) for request_id in copies} == {"request_quarantined"}


def test_those_of_a_silent_worker_are_tried_again_at_once_and_together() -> None:
    made = Hold(workers=2, slots=32, poison={}, silent=False)
    made.slow = 30
    ids = [made.submit() for _ in range(20)]
    made.run_pending()
    held = {item.request.request_id for item in made.work.values() if item.worker == made.workers[0].name}
    made.tick()
    made.workers[0].alive = False
    while not any(item.attempt == 2 for item in made.work.values()):
        made.tick()
    again = {item.request.request_id for item in made.work.values() if item.attempt == 2}
    assert again == held and len(held) == 10
    made.play()
    assert {made.outcome(request_id) for request_id in ids} == {"completed"}


@pytest.mark.parametrize(("accused", "rounds"), [(2, 2), (8, 4), (20, 6), (64, 9)])
def test_the_accused_are_cleared_in_about_as_many_rounds_as_the_root_of_their_number(accused: int, rounds: int) -> None:
    """A round is what the first token takes, here a tick; the two survivors share the work."""
    made = Hold(workers=1, slots=accused, poison={"bad": 0}, silent=False)
    ids = [made.submit(body_hash=f"good {n}", stream=False) for n in range(accused - 1)]
    made.submit(body_hash="bad", stream=False)
    made.run_pending()
    for _ in range(2):
        made.ready_worker(accused, 1_000_000)
    made.workers[0].slots, began = 0, made.now
    made._take_work(made.workers[0])
    made.workers[0].slots = accused
    made.play()
    assert made.deaths == (2 if accused < 4 else 3)
    last = max(made.first_token[request_id] for request_id in ids)
    assert (last - began) / 500 <= 2 + 2 * rounds, "a tick to run, and one to be told of it"


def test_a_takeover_between_deaths_counts_right() -> None:
    for silent in (True, False):
        made = Hold(workers=3, slots=8, poison={"bad": 0}, silent=silent)
        good = [made.submit(body_hash=f"good {n}", stream=False) for n in range(20)]
        bad = made.submit(body_hash="bad", stream=False)
        for deaths in (1, 2):
            while made.deaths < deaths:
                made.tick()
            while made.core.accused.of(made.asked[bad]).deaths < deaths:
                made.tick()
            made.take_over()
            assert made.core.accused.of(made.asked[bad]).deaths >= deaths, "nothing is forgotten"
        made.play()
        assert made.deaths <= ENGINES_MAX and made.outcome(bad) == "request_quarantined"
        assert {made.outcome(request_id) for request_id in good} == {"completed"}
        made.take_over()
        assert made.answers[made.submit(body_hash="bad")].code == "request_quarantined"


def test_suspects_stand_before_nobody() -> None:
    """64 of them with the earliest deadlines wait for two workers; who came later runs beside them."""
    made = Hold(workers=1, slots=64, poison={}, silent=False)
    suspects = {made.submit() for _ in range(64)}
    made.run_pending()
    made.pull(made.workers[0])
    for _ in range(2):
        made.ready_worker(slots=64, kv_tokens=1_000_000)
    made.crash(made.workers[0])
    made.run_pending()
    fresh = {made.submit(prompt_tokens=tokens) for tokens in range(1, 101)}
    made.run_pending()
    dispatched = {item.request.request_id for item in made.work.values()}
    again = {item.request.request_id for item in made.work.values() if item.attempt == 2}
    assert fresh <= dispatched and again <= suspects and len(again) == 3 * 8


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_three_engines_die_for_a_body_at_most(seed: int) -> None:
    """Random pools, neighbours, copies, killers and takeovers; one killer, or the deaths could be another's."""
    rng = random.Random(seed)
    silent = rng.random() < 0.5
    made = Hold(
        workers=rng.randint(1, 4), slots=rng.choice([1, 4, 16]), poison={"bad": rng.randint(0, 3)}, silent=silent
    )
    ids: list[str] = []
    for _ in range(rng.randint(10, 60)):
        drawn = rng.random()
        if drawn < 0.5:
            ids.append(made.submit(body_hash=f"good {rng.randint(0, 15)}", stream=False))
        elif drawn < 0.6 and not any(it.envelope.body_hash == "bad" for it in made.core.requests.values()):
            made.submit(body_hash="bad", stream=rng.random() < 0.3)
        elif drawn < 0.63:
            made.take_over()
        else:
            made.tick()
    made.play(3000)
    assert made.deaths <= ENGINES_MAX
    assert {made.outcome(request_id) for request_id in ids} <= {"completed"}
    assert all(request.envelope.body_hash == "bad" for request in made.quarantined.values())
    assert all(request.state is not State.QUEUED for request in made.core.requests.values())
