"""The roll-out of one model: which version a request gets, when the next step begins, when it is over. Pure.

What the operator wants is the plan; what the judge finds may end it at any moment. Versions are drawn by hash of the
unit, so that a unit keeps its side, also when the share grows. Pins and running requests are never moved. While the new
version has no worker, or no room, what would be its goes to the stable one, and nothing counts for either.
"""

import hashlib
from collections.abc import Callable

from contracts.messages.admission import AdmissionRequest
from contracts.messages.base import RequestDemand
from contracts.messages.rollouts import OVER, Arm, Phase, RolloutEvent, RolloutNews, RolloutPlan, RolloutProgress
from scheduler.core import events
from scheduler.core.rollout.baseline import Baseline
from scheduler.core.rollout.judge import Judge, Watched

KEPT_EVERY_MS = 1_000
"""The evidence is written so often at most: an owner that dies loses a second of it."""
LEAP_MS_MAX = 1_000
"""A longer time between two looks counts as this for a step's hold: nobody watched meanwhile."""


class Rollout:
    """One roll-out, as its model's owner runs it. ``do`` takes what is to be done."""

    def __init__(
        self,
        plan: RolloutPlan,
        progress: RolloutProgress | None,
        *,
        baseline: Baseline,
        stable: str,
        now_ms: int,
        do: Callable[[events.Effect], None],
    ) -> None:
        self.plan = plan
        self._do = do
        self._looked_at_ms = now_ms
        self._kept_at_ms = 0
        self._kept: RolloutProgress | None = None
        self.spilled = progress.spilled if progress is not None else 0
        self.released = progress.released if progress is not None else None
        self.ended_at_ms = progress.ended_at_ms if progress is not None else 0
        self.reason = progress.reason if progress is not None else ""
        self.held_ms = progress.held_ms if progress is not None else 0
        self.step = progress.step if progress is not None else 0
        self.paused = progress.paused if progress is not None else False
        self.phase: Phase = progress.phase if progress is not None else ("shadow" if plan.shadow else "live")
        self.judge = Judge(baseline, stable=progress.stable if progress is not None else stable, to=plan.to)
        if progress is not None:
            self.judge.restore(progress)
        else:
            self.judge.begin_step(self._share_of_evidence())
            self._tell("started", now_ms)
        if self.phase == "promoting":
            self._do(events.SetStable(plan.to))

    @property
    def over(self) -> bool:
        """Whether it has ended, one way or the other."""
        return self.phase in OVER

    @property
    def stable(self) -> str:
        """The version that was stable when it began."""
        return self.judge.stable

    @property
    def share(self) -> float:
        """Of the units that are drawn: the new version's, 0 to 1."""
        return self.plan.steps[self.step] / 100 if self.phase == "live" else 0.0

    def _share_of_evidence(self) -> float:
        """Of what is watched: copies come on top of what they are copies of."""
        if self.phase == "shadow":
            copied = self.plan.shadow / 100
            return copied / (1 + copied)
        return self.share

    # -- which version -----------------------------------------------------------------------------------

    def assign(self, asked: AdmissionRequest, *, has_room: bool) -> tuple[str, Arm]:
        """The version of a request that has no pin, and whether it counts; empty where this roll-out has no say."""
        if self.phase not in ("live", "shadow") or (self.plan.tenants and asked.tenant not in self.plan.tenants):
            return "", ""
        if self.phase == "shadow":
            return "", ("stable" if has_room and not asked.body_bytes else "")
        canary = self._drawn(self._unit(asked)) < self.share
        if not has_room:
            self.spilled += canary
            return "", ""
        return (self.plan.to, "canary") if canary else ("", "stable")

    def copies(self, request: RequestDemand) -> bool:
        """Whether the new version gets a copy of the request, which the stable one serves."""
        if self.phase != "shadow":
            return False
        return self._drawn(f"copy\0{request.request_id}") < self.plan.shadow / 100

    def watch(self, request: RequestDemand, arm: Arm) -> None:
        """A request that the roll-out gave a version is open from now on."""
        if not self.over:
            watched = Watched(
                arm,
                self._unit(request),
                shared=self.plan.by != "request",
                step=len(self.judge.steps) - 1,
                prompt_tokens=request.prompt_tokens,
                choices=request.choices,
            )
            self.judge.watch(request.request_id, watched)

    def _unit(self, request: RequestDemand) -> str:
        match self.plan.by:
            case "tenant":
                return request.tenant
            case "conversation" if request.conversation:
                return f"{request.tenant}\0{request.conversation}"
        return request.request_id

    def _drawn(self, unit: str) -> float:
        digest = hashlib.blake2b(f"{self.plan.id}\0{unit}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64

    # -- what the operator wants -------------------------------------------------------------------------

    def change(self, plan: RolloutPlan, now_ms: int) -> None:
        """The operator has changed what is wanted of this roll-out."""
        self.plan = plan
        self._obey(now_ms)

    def _obey(self, now_ms: int) -> None:
        if self.over or self.phase == "promoting":
            return
        wanted = self.plan.wanted
        if wanted == "abort":
            self._end("aborted", "the operator aborted it", now_ms)
        elif wanted == "promote":
            self._promote("the operator promoted it", now_ms)
        elif self.paused != (wanted == "pause"):
            self.paused = wanted == "pause"
            self._tell("paused" if self.paused else "resumed", now_ms)

    def stable_is(self, stable: str, now_ms: int) -> None:
        """What the registry says is the stable version."""
        if self.phase == "promoting" and stable == self.plan.to:
            self._end("promoted", self.reason, now_ms)
        elif not self.over and self.phase != "promoting" and stable != self.stable:
            self._end("aborted", f"the stable version was changed to {stable}", now_ms)

    # -- what time and evidence bring --------------------------------------------------------------------

    def pass_time(self, now_ms: int, *, has_worker: bool, has_capacity: bool) -> None:
        """Steps end when their time is over and the evidence is there.

        ``has_capacity``: the new version could serve all that is served now.
        """
        span_ms, self._looked_at_ms = min(now_ms - self._looked_at_ms, LEAP_MS_MAX), now_ms
        if self.over:
            return
        self._obey(now_ms)
        self.judge.pass_time(now_ms)
        self.look(now_ms)
        if self.phase not in ("live", "shadow"):
            return
        if has_worker and not self.paused:
            self.held_ms += span_ms
            if self.held_ms >= self.plan.hold_ms and not self.judge.missing(copies=self.phase == "shadow"):
                self._go_on(now_ms, has_capacity=has_capacity)
        if now_ms - self._kept_at_ms >= KEPT_EVERY_MS:
            self._keep(now_ms, has_worker=has_worker)

    def look(self, now_ms: int) -> None:
        """Act on what has just been found."""
        if self.phase not in ("live", "shadow"):
            return
        while (verdict := self.judge.verdict()) is not None:
            if not verdict.worker:
                self._end("stopped", verdict.reason, now_ms)
                return
            self._tell("bad_worker", now_ms, verdict.reason)

    def _go_on(self, now_ms: int, *, has_capacity: bool) -> None:
        following = self._following
        if following == len(self.plan.steps):
            return  # The rest is the operator's to say.
        if self._promotes_next:
            if has_capacity:
                self._promote("every step went well", now_ms)
            return
        self.phase, self.step, self.held_ms = "live", following, 0
        self.judge.begin_step(self._share_of_evidence())
        self._tell("step", now_ms)

    @property
    def _following(self) -> int:
        """Index of the next step."""
        return 0 if self.phase == "shadow" else self.step + 1

    @property
    def _promotes_next(self) -> bool:
        """Whether the next step is everybody, which needs no roll-out any more."""
        return (
            self._following < len(self.plan.steps) and self.plan.steps[self._following] >= 100 and not self.plan.tenants
        )

    def _promote(self, why: str, now_ms: int) -> None:
        """Everybody's from now on; once the registry says so it is over."""
        self.phase, self.reason = "promoting", why
        self._do(events.SetStable(self.plan.to))
        self._keep(now_ms)

    def _end(self, phase: Phase, reason: str, now_ms: int) -> None:
        self.phase, self.reason, self.ended_at_ms, self.paused = phase, reason, now_ms, False
        news: RolloutNews = "promoted" if phase == "promoted" else "aborted" if phase == "aborted" else "stopped"
        self._tell(news, now_ms, reason)
        self.judge.open.clear()

    def release(self, workers: list[str]) -> None:
        """It is over, and these served the new version then: from now on they go with the stable one."""
        if self.released is None:
            self.released = workers
            self._keep(self.ended_at_ms)

    def _tell(self, news: RolloutNews, now_ms: int, reason: str = "") -> None:
        """The next owner must know of it before anybody else does."""
        self._keep(now_ms)
        told = RolloutEvent(
            id=self.plan.id,
            model=self.plan.model,
            news=news,
            stable=self.stable,
            to=self.plan.to,
            share=self.share,
            at_ms=now_ms,
            reason=reason,
            measures=self.judge.measures(),
        )
        self._do(events.TellRollout(told))

    # -- what is kept ------------------------------------------------------------------------------------

    def _keep(self, now_ms: int, *, has_worker: bool = True) -> None:
        self._kept_at_ms = now_ms
        progress = self.progress(has_worker=has_worker)
        if progress != self._kept:
            self._kept = progress
            self._do(events.KeepRollout(progress))

    def progress(self, *, has_worker: bool = True) -> RolloutProgress:
        """How it stands, for the next owner and for people."""
        return RolloutProgress(
            id=self.plan.id,
            model=self.plan.model,
            stable=self.stable,
            to=self.plan.to,
            phase=self.phase,
            step=self.step,
            held_ms=self.held_ms,
            share=self.share,
            paused=self.paused,
            evidence=[step.message() for step in self.judge.steps],
            thresholds=self.judge.baseline.thresholds,
            units=self.judge.kept_units(),
            bad_workers=list(self.judge.bad_workers),
            measures=self.judge.measures(),
            waits_for=self._waits_for(has_worker=has_worker),
            reason=self.reason,
            spilled=self.spilled,
            released=self.released,
            ended_at_ms=self.ended_at_ms,
        )

    def _waits_for(self, *, has_worker: bool) -> str:
        if self.phase == "promoting":
            return "the registry"
        if self.over:
            return ""
        if self.paused:
            return "the operator: it is paused"
        if not has_worker:
            return (
                f"a worker of {self.plan.to} that is ready: until then its share goes to {self.stable} "
                f"(headrace worker add {self.plan.model} --version {self.plan.to})"
            )
        if (left_ms := self.plan.hold_ms - self.held_ms) > 0:
            return f"the end of the step's time, in {left_ms / 1000:.0f} s at the earliest"
        if missing := self.judge.missing(copies=self.phase == "shadow"):
            return missing
        if self._promotes_next:
            return f"more workers of {self.plan.to}: it has fewer slots than are in use"
        return "the operator: all steps went well; promote makes it the stable version, abort takes it back"


def progress_of(plan: RolloutPlan, progress: RolloutProgress | None) -> RolloutProgress | None:
    """The progress, where it is of that plan."""
    return progress if progress is not None and progress.id == plan.id else None
