"""Whether a new version is worse than the stable one: bad units by version, and what follows from them. Pure.

A unit (a request, a tenant or a conversation: what the shares are drawn by) is bad once at most for each criterion, in
the whole roll-out, and from the moment at which the limit is crossed: what hangs never ends. It is the version's that
the roll-out gave it first, whoever answers in the end. The death of an engine is one incident, however many it ran.

One side may be heard of later than the other, or less often: the stable version's requests wait in a queue, their
callers leave it, more of them are refused. So labels are compared with the units that have been judged so far, those
that were served or went badly, and not with the share that was given alone (``tally``).

Stop when any criterion's e-value against the version reaches CRITERIA / ALPHA, at any moment; go on only with the
reverse evidence. ``tests/bench/bench_rollout`` measures how well it judges.
"""

import hashlib
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from contracts.errors import TABLE
from contracts.messages.attempts import AttemptEvent
from contracts.messages.rollouts import CRITERIA, Arm, Criterion, Measure, RolloutProgress
from scheduler.core.rollout import evidence
from scheduler.core.rollout.baseline import Baseline, criterion_of, first_token_key, values, work_class
from scheduler.core.rollout.tally import WORKERS_MAX, Tally

ALPHA = 0.001
"""Chance that a version that is not worse than tolerated is ever stopped, over all criteria."""
RATIO_TOLERATED = 1.5
"""So many times as many bad events as stable's are no reason to stop: noise of placement, cold caches."""
RATIO_REFUTED = 2.0
"""A step ends once it is refuted that the version is so many times as bad. At 1.5 an equal one would need three times
as many requests (264 of its own instead of 94 at a share of 5 %, measured)."""
RATE_TOLERATED = 0.05
"""Or once it is refuted that so many of its units are bad at all: where stable has no bad ones there is nothing to
compare with."""
LOG_STOP = math.log(len(CRITERIA) / ALPHA)
LOG_GO_ON = math.log(20)

LATE_NEWS_MS = 1_500
"""Heartbeats come each 500 ms: what they do not show yet may have happened. Two that are missing, and a moment."""
INCIDENT_MS = 5_000
"""Engine deaths of one worker within it are one incident: a new engine takes longer to load."""
UNITS_MAX = 4_096
"""Bad units that are remembered, so that none counts twice; the oldest go first."""
REQUESTS_MIN = 20
"""Of the new version in a step: without them nothing is known of what the step's share brings."""
BAD_WORKER_ALPHA = 0.02
"""Chance of so many bad events on one worker if all of them were alike."""
WARM_UP = 2
"""First requests of a new version's worker whose first token does not count: its caches are cold."""

TEXTS: dict[Criterion, str] = {
    "errors": "ended with an error",
    "first_token": "had their first token later than the stable version's 90th percentile",
    "pauses": "paused between tokens for longer than the stable version's 90th percentile",
    "length": "were longer than the stable version's 95th percentile, or ended by the limit",
    "empty": "had an empty answer",
}


class Verdict(NamedTuple):
    """``worker``: it is bad, and not the version; empty: the version is to be stopped."""

    reason: str
    worker: str = ""


class Watched:
    """A request that the roll-out gave a version, while it is open."""

    __slots__ = (
        "arm",
        "choices",
        "cold",
        "dispatched_at_ms",
        "judged",
        "prompt_tokens",
        "seen_at_ms",
        "shared",
        "step",
        "tokens",
        "unit",
        "worker",
    )

    def __init__(self, arm: Arm, unit: str, *, shared: bool, step: int, prompt_tokens: int, choices: int) -> None:
        self.arm = arm
        self.unit = unit
        self.shared = shared
        """Whether other requests may be of the same unit."""
        self.step = step
        """In which it was given its version."""
        self.prompt_tokens = prompt_tokens
        self.choices = choices
        self.worker = ""
        self.cold = False
        """Whether its worker is new: what its first token waits for is not the version."""
        self.judged = False
        """Whether it has been served, or has gone badly."""
        self.dispatched_at_ms = 0
        """Of the present attempt; 0 while none runs."""
        self.tokens = 0
        self.seen_at_ms = 0
        """When its tokens last grew."""


class Judge:
    """Of one roll-out. ``baseline`` is the stable version's, and goes on when the roll-out is over."""

    def __init__(self, baseline: Baseline, *, stable: str, to: str) -> None:
        self.baseline = baseline
        self.stable = stable
        self.to = to
        self.steps: list[Tally] = []
        self.open: dict[str, Watched] = {}
        """By request id."""
        self.bad_workers: list[str] = []
        self._units: OrderedDict[int, None] = OrderedDict()
        self._warmed: Counter[str] = Counter()
        """Requests that a worker of the new version was given, up to WARM_UP."""
        self._incidents: dict[str, int] = {}
        """Worker -> when its engine last began to die."""
        self._suspicious: dict[Criterion, None] = {}
        """Criteria that may have another verdict than the last one."""

    # -- what an owner keeps for the next one ---------------------------------------------------------------

    def restore(self, progress: RolloutProgress) -> None:
        """Go on from what an earlier owner kept."""
        self.steps = [Tally.of(step) for step in progress.evidence]
        self.bad_workers = list(progress.bad_workers)
        numbers = struct.unpack(f"<{len(progress.units) // 4}I", progress.units[: len(progress.units) // 4 * 4])
        self._units = OrderedDict.fromkeys(numbers)
        self._warmed = Counter(
            name for step in self.steps for name, its in step.workers.items() for _ in range(min(its.requests, WARM_UP))
        )
        self.baseline.restore(progress.thresholds)
        self._suspicious = dict.fromkeys(CRITERIA)

    def kept_units(self) -> bytes:
        """The bad units, for ``restore``."""
        return struct.pack(f"<{len(self._units)}I", *self._units)

    def begin_step(self, share: float) -> None:
        """From now on the version gets ``share`` of the units, 0 to 1."""
        self.steps.append(Tally(share))

    # -- what happens to requests -------------------------------------------------------------------------

    def watch(self, request_id: str, watched: Watched) -> None:
        """A request was given a version by the roll-out."""
        self.open[request_id] = watched

    def forget(self, request_id: str) -> None:
        """It is settled, or its reservation expired."""
        self.open.pop(request_id, None)

    def dispatched(self, request_id: str, worker: str, now_ms: int) -> None:
        """An attempt of it begins."""
        if (watched := self.open.get(request_id)) is None:
            return
        watched.worker, watched.dispatched_at_ms, watched.seen_at_ms, watched.tokens = worker, now_ms, now_ms, 0
        watched.cold = watched.arm != "stable" and self._warmed[worker] < WARM_UP
        if watched.cold and (worker in self._warmed or len(self._warmed) < WORKERS_MAX):
            self._warmed[worker] += 1

    def progressed(self, request_id: str, tokens: int, now_ms: int) -> None:
        """Its worker told of its tokens, over all choices."""
        watched = self.open.get(request_id)
        if watched is None or tokens <= watched.tokens:
            return
        watched.tokens, watched.seen_at_ms = tokens, now_ms
        limit = self.baseline.threshold("length")
        if limit is not None and tokens / max(1, watched.choices) > limit:
            self._bad(watched, "length")

    def pass_time(self, now_ms: int) -> None:
        """What hangs is bad as soon as it is too late, whether it ever ends or not. Labels are compared anew: the units
        judged since the last look may have made the evidence stronger."""
        self._suspicious = dict.fromkeys(CRITERIA)
        for watched in self.open.values():
            if not watched.dispatched_at_ms:
                continue
            late_ms = now_ms - watched.seen_at_ms - LATE_NEWS_MS
            if watched.tokens:
                limit = self.baseline.threshold("pauses")
                criterion: Criterion = "pauses"
            else:
                limit = self.baseline.threshold(first_token_key(work_class(watched.prompt_tokens)))
                criterion = "first_token"
            if limit is not None and late_ms > limit:
                self._bad(watched, criterion)

    def ended(self, event: AttemptEvent, now_ms: int) -> None:
        """An attempt of a request has its end. One that its caller or a quota ended says nothing of its version."""
        watched = self.open.get(event.request_id)
        counts = event.outcome in ("completed", "failed", "lost") and not event.given_back
        if watched is None:
            if event.version == self.stable and event.outcome == "completed" and event.arm in ("", "stable"):
                self.baseline.add(values(event))
            return
        began_at_ms, watched.dispatched_at_ms = watched.dispatched_at_ms, 0
        if not counts or not event.attempt:
            return
        worker = (event.worker or watched.worker) if event.version == self.to or watched.arm == "stable" else ""
        if _is_error(event):
            if event.engine_death:
                self._died(watched, worker, now_ms)
            else:
                self._bad(watched, "errors", worker)
        elif event.outcome == "completed":
            self._completed(watched, event, worker)
        if began_at_ms and (event.outcome == "completed" or _is_error(event)):
            self._judged(watched, worker)

    def _completed(self, watched: Watched, event: AttemptEvent, worker: str) -> None:
        measured = values(event)
        for key, value in measured.items():
            criterion, limit = criterion_of(key), self.baseline.threshold(key)
            if limit is not None and value > limit and not (criterion == "first_token" and watched.cold):
                self._bad(watched, criterion, worker)
        nothing = event.completion_tokens <= event.choices and event.finish_reason != "length"
        if nothing and event.endpoint != "embeddings":
            self._bad(watched, "empty", worker)
        if watched.arm == "stable":
            self.baseline.add(measured)

    def _died(self, watched: Watched, worker: str, now_ms: int) -> None:
        """One incident, whoever was aboard."""
        if now_ms - self._incidents.get(worker, -INCIDENT_MS) < INCIDENT_MS:
            return
        if len(self._incidents) >= WORKERS_MAX:
            del self._incidents[next(iter(self._incidents))]
        self._incidents[worker] = now_ms
        self._bad(watched, "errors", worker)

    # -- counting -----------------------------------------------------------------------------------------

    def _first_time(self, watched: Watched, what: str) -> bool:
        """Whether the unit has not been counted as that; it has, from now on."""
        copied = "copy" if watched.arm == "shadow" else ""
        digest = hashlib.blake2b(f"{what}\0{copied}\0{watched.unit}".encode(), digest_size=4).digest()
        (number,) = struct.unpack("<I", digest)
        if number in self._units:
            return False
        self._units[number] = None
        if len(self._units) > UNITS_MAX:
            self._units.popitem(last=False)
        return True

    def _bad(self, watched: Watched, criterion: Criterion, worker: str = "") -> None:
        worker = worker or watched.worker
        canary = watched.arm != "stable"
        if (canary and worker in self.bad_workers) or not self._first_time(watched, criterion):
            return
        self._judged(watched, worker)
        self.steps[watched.step].add_bad(criterion, canary=canary, worker=worker)
        self._suspicious[criterion] = None

    def _judged(self, watched: Watched, worker: str) -> None:
        """One more unit of its version of which is known how it went."""
        step, canary = self.steps[watched.step], watched.arm != "stable"
        if watched.judged or (canary and worker in self.bad_workers):
            return
        watched.judged = True
        if canary:
            step.add_request(worker)
        if not watched.shared or self._first_time(watched, "seen"):
            step.add_unit(canary=canary)

    # -- judging ------------------------------------------------------------------------------------------

    def verdict(self) -> Verdict | None:
        """Whether the version, or one of its workers, is to be stopped now; None: neither."""
        suspicious, self._suspicious = self._suspicious, {}
        for criterion in suspicious:
            if self.log_against(criterion) < LOG_STOP:
                continue
            worker = self._suspect(criterion)
            if not worker:
                return Verdict(self._reason(criterion))
            if self._is_bad_alone(criterion, worker):
                verdict = Verdict(self._reason_of_worker(criterion, worker), worker)
                self._leave_out(worker)
                return verdict
            self._suspicious[criterion] = None  # The next events tell the two apart.
        return None

    def log_against(self, criterion: Criterion) -> float:
        """ln e against the version, over all steps."""
        return sum(step.log_against(criterion, RATIO_TOLERATED) for step in self.steps)

    def log_for(self, criterion: Criterion) -> float:
        """ln e' for the version, over all steps: it is not RATIO_REFUTED times as bad, or not RATE_TOLERATED."""
        compared = sum(step.log_for(criterion, RATIO_REFUTED) for step in self.steps)
        return max(compared, _log_seldom(self.steps, criterion))

    def missing(self, *, copies: bool = False) -> str:
        """What the present step waits for before the next one may begin; empty when nothing is missing.

        ``copies``: the step has only those, which hurt no caller: it is enough that nothing speaks against the version.
        """
        step = self.steps[-1]
        if step.share >= 1:
            return ""  # There is nothing left to compare with.
        wanted = []
        for criterion in CRITERIA:
            if copies:
                if (against := self.log_against(criterion)) > 0:
                    wanted.append(f"{criterion} (e = {_power(against)} against it, at most 1 is wanted)")
                continue
            found = self.log_for(criterion)
            own = max(step.log_for(criterion, RATIO_REFUTED), _log_seldom([step], criterion))
            if found < LOG_GO_ON:
                wanted.append(f"{criterion} (e' = {_power(found)}, 20 is needed)")
            elif own < 0:
                wanted.append(f"{criterion} (in this step alone e' = {_power(own)}, 1 is needed)")
        if step.canary >= REQUESTS_MIN and not wanted:
            return ""
        if step.canary < REQUESTS_MIN:
            wanted.insert(0, f"{REQUESTS_MIN} requests of {self.to} in this step")
        return (
            f"more requests, to know that {self.to} is not worse: {', '.join(wanted)}. "
            f"So far in this step: {step.canary} of {self.to}, {step.stable} of {self.stable}."
        )

    def measures(self) -> list[Measure]:
        """How each criterion stands."""
        return [self._measure(criterion) for criterion in CRITERIA]

    def _measure(self, criterion: Criterion) -> Measure:
        canary, stable = self._bad_of(criterion)
        return Measure(
            criterion=criterion,
            canary=canary,
            stable=stable,
            log_against=round(self.log_against(criterion), 4),
            log_for=round(self.log_for(criterion), 4),
            log_stop=round(LOG_STOP, 4),
            log_go_on=round(LOG_GO_ON, 4),
        )

    def _bad_of(self, criterion: Criterion) -> tuple[int, int]:
        """Bad units of the new version, and of the stable one."""
        canary = sum(step.bad_canary[criterion] for step in self.steps)
        return canary, sum(step.bad[criterion] for step in self.steps) - canary

    # -- one bad worker -----------------------------------------------------------------------------------

    def _suspect(self, criterion: Criterion) -> str:
        """The worker that may be bad, and not the version: the others have served, too, and have no part in it.

        Empty where the others do not exonerate the version: they have bad events enough of their own, or have hardly
        served yet.
        """
        requests, events = self._by_worker(criterion)
        worst = max(events, key=lambda name: events[name], default="")
        others = requests.total() - requests[worst]
        if not worst or events[worst] * others < max(1, requests[worst]):
            return ""
        if events.total() == events[worst]:
            return worst
        return worst if self._is_bad_alone(criterion, worst) else ""

    def _is_bad_alone(self, criterion: Criterion, worker: str) -> bool:
        """Whether events pile up on it by more than chance, and without it nothing is amiss."""
        requests, events = self._by_worker(criterion)
        chance = max(1, requests[worker]) / (requests.total() + 1)
        piled = evidence.log_chance_of_more(events[worker], events.total(), chance)
        if piled + math.log(len(requests)) > math.log(BAD_WORKER_ALPHA):
            return False
        others = [step.without(worker) for step in self.steps]
        return sum(step.log_against(criterion, RATIO_TOLERATED) for step in others) < LOG_STOP

    def _by_worker(self, criterion: Criterion) -> tuple[Counter[str], Counter[str]]:
        """Requests and bad events of the new version, by worker."""
        requests: Counter[str] = Counter()
        events: Counter[str] = Counter()
        for step in self.steps:
            for name, its in step.workers.items():
                requests[name] += its.requests
                events[name] += its.events.get(criterion, 0)
        return requests, events

    def _leave_out(self, worker: str) -> None:
        """What it did counts for nothing from now on."""
        self.bad_workers = [*self.bad_workers, worker][-WORKERS_MAX:]
        self.steps = [step.without(worker) for step in self.steps]
        self._suspicious = dict.fromkeys(CRITERIA)

    def _reason(self, criterion: Criterion) -> str:
        canary, stable = self._bad_of(criterion)
        requests, others = sum(step.canary for step in self.steps), sum(step.stable for step in self.steps)
        return (
            f"{self.to} is worse than {self.stable} by {criterion}: {canary} of its requests, and {stable} of "
            f"{self.stable}'s, {TEXTS[criterion]}; so far {requests} of its requests were served, and {others} of "
            f"{self.stable}'s. e = {_power(self.log_against(criterion))}, the limit is {math.exp(LOG_STOP):,.0f}."
        )

    def _reason_of_worker(self, criterion: Criterion, worker: str) -> str:
        mine = sum(step.workers[worker].events.get(criterion, 0) for step in self.steps if worker in step.workers)
        every, _ = self._bad_of(criterion)
        return (
            f"worker {worker} is bad by {criterion}, and not {self.to}: of the {every} requests of the version that "
            f"{TEXTS[criterion]}, {mine} were on it. It gets nothing more: replace it."
        )


def _is_error(event: AttemptEvent) -> bool:
    """The service's own failure: not the caller's mistake, and not a worker that would not take it."""
    if event.outcome == "lost":
        return event.engine_death  # Else it never reached its worker.
    spec = TABLE.get(event.error_code)
    return event.outcome == "failed" and not event.given_back and (spec is None or spec.status >= 500)


def _log_seldom(steps: Sequence[Tally], criterion: Criterion) -> float:
    """ln e' against "at least RATE_TOLERATED of the version's units are bad"."""
    units = sum(step.canary for step in steps)
    bad = min(sum(step.bad_canary[criterion] for step in steps), units)
    return evidence.log_for(bad, units, RATE_TOLERATED)


def _power(log: float) -> str:
    return f"{math.exp(log):.3g}" if log < 600 else f"10^{log / math.log(10):.0f}"
