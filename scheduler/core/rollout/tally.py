"""What was counted in one step of a roll-out: units of both versions, the bad ones by criterion and by worker.

Of equally good versions a bad unit is the canary's with a probability that is its share of the units judged. That is
the share that it was given, unless one side is heard of later, or less often: then it is what was found, where that
speaks less loudly. (Of n bad ones among all that were judged, so many are the canary's by a hypergeometric
distribution, which spreads less than the binomial one of the evidence: whatever the lag, the evidence of any one moment
is no more than it says. Hoeffding, Probability inequalities for sums of bounded random variables, 1963, section 6.)
"""

from contracts.messages.rollouts import CRITERIA, Counted, Criterion, StepEvidence, WorkerEvidence
from scheduler.core.rollout import evidence

WORKERS_MAX = 64
"""Workers whose part is kept apart; what others do counts for the version alone."""


class WorkerTally:
    """One worker of the new version."""

    __slots__ = ("events", "requests")

    def __init__(self, requests: int = 0, events: dict[Criterion, int] | None = None) -> None:
        self.requests = requests
        self.events: dict[Criterion, int] = events or {}


class Tally:
    """One step, in which the new version gets ``share`` of the units, 0 to 1."""

    __slots__ = ("bad", "bad_canary", "canary", "share", "stable", "workers")

    def __init__(self, share: float) -> None:
        self.share = share
        self.canary = 0
        """Units of the new version that were judged: served, or bad."""
        self.stable = 0
        self.bad: dict[Criterion, int] = dict.fromkeys(CRITERIA, 0)
        """Bad units of both versions."""
        self.bad_canary: dict[Criterion, int] = dict.fromkeys(CRITERIA, 0)
        self.workers: dict[str, WorkerTally] = {}

    def add_bad(self, criterion: Criterion, *, canary: bool, worker: str) -> None:
        """One more bad unit; ``worker`` counts for the new version only."""
        self.bad[criterion] += 1
        if canary:
            self.bad_canary[criterion] += 1
            if (its := self._worker(worker)) is not None:
                its.events[criterion] = its.events.get(criterion, 0) + 1

    def add_unit(self, *, canary: bool) -> None:
        """One more unit was judged."""
        if canary:
            self.canary += 1
        else:
            self.stable += 1

    def add_request(self, worker: str) -> None:
        """A request of the new version was judged on a worker."""
        if (its := self._worker(worker)) is not None:
            its.requests += 1

    def _worker(self, name: str) -> WorkerTally | None:
        if name not in self.workers:
            if not name or len(self.workers) >= WORKERS_MAX:
                return None
            self.workers[name] = WorkerTally()
        return self.workers[name]

    def log_against(self, criterion: Criterion, ratio: float) -> float:
        """ln e against "at most ``ratio`` times as bad"; 0 where there is nothing to compare with."""
        share = max(self.share, self._judged_share)
        if not self.bad[criterion] or not 0 < share < 1:
            return 0.0
        theta0 = evidence.tolerated(share, ratio)
        return evidence.log_against(self.bad_canary[criterion], self.bad[criterion], theta0)

    def log_for(self, criterion: Criterion, ratio: float) -> float:
        """ln e' against "at least ``ratio`` times as bad"; likewise."""
        share = min(self.share, self._judged_share)
        if not self.bad[criterion] or not 0 < share < 1:
            return 0.0
        theta0 = evidence.tolerated(share, ratio)
        return evidence.log_for(self.bad_canary[criterion], self.bad[criterion], theta0)

    @property
    def _judged_share(self) -> float:
        """The canary's share of the units judged, 0 to 1."""
        judged = self.canary + self.stable
        return self.canary / judged if judged else self.share

    def without(self, worker: str) -> "Tally":
        """The step as if the worker had had no part in it: the others' share of the units is smaller."""
        if worker not in self.workers:
            return self
        its = self.workers[worker]
        requests = sum(each.requests for each in self.workers.values())
        others = self.share * (1 - its.requests / requests) if requests else self.share
        left = Tally(others / (others + 1 - self.share) if self.share < 1 else self.share)
        left.canary, left.stable = max(0, self.canary - its.requests), self.stable
        for criterion in CRITERIA:
            left.bad[criterion] = self.bad[criterion] - its.events.get(criterion, 0)
            left.bad_canary[criterion] = self.bad_canary[criterion] - its.events.get(criterion, 0)
        left.workers = {name: each for name, each in self.workers.items() if name != worker}
        return left

    def message(self) -> StepEvidence:
        """For the next owner."""
        return StepEvidence(
            share=self.share,
            canary=self.canary,
            stable=self.stable,
            criteria={
                criterion: Counted(canary=self.bad_canary[criterion], events=events)
                for criterion, events in self.bad.items()
                if events
            },
            workers={
                name: WorkerEvidence(requests=each.requests, events=dict(each.events))
                for name, each in self.workers.items()
            },
        )

    @classmethod
    def of(cls, message: StepEvidence) -> "Tally":
        """What an earlier owner counted."""
        tally = cls(message.share)
        tally.canary, tally.stable = message.canary, message.stable
        for criterion, counted in message.criteria.items():
            tally.bad[criterion], tally.bad_canary[criterion] = counted.events, counted.canary
        tally.workers = {name: WorkerTally(each.requests, dict(each.events)) for name, each in message.workers.items()}
        return tally
