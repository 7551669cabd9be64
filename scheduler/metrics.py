"""The scheduler's figures for Prometheus: read from the cores when they are scraped, or counted at each dispatch."""

from collections.abc import Callable, Iterator
from functools import cache

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from contracts.histograms import Histogram
from contracts.messages.request import WorkItem
from contracts.messages.rollouts import RolloutNews
from contracts.workload import LABELS, scope
from scheduler.core.core import Core

_queue_time = Histogram(
    "headrace_request_queue_time_seconds",
    "From a request's admission to its first dispatch",
    LABELS,
    least=0.001,
    most=3600.0,
)
_SOON = ("overloaded", "rate_limit_exceeded")
"""Codes of refusals that are shown before the first."""
_retries = cache(Counter("headrace_retries", "Dispatches of a request after its first", ("model",)).labels)
_news = cache(Counter("headrace_rollout_news", "What was told of roll-outs", ("model", "news")).labels)


def count_news(model: str, news: RolloutNews) -> None:
    """It stands in the stream ROLLOUT_EVENTS."""
    _news(model, news).inc()


def count_dispatch(item: WorkItem) -> None:
    """WORK holds it."""
    if item.attempt == 1:
        waited_ms = item.dispatched_at_ms - item.request.admitted_at_ms
        _queue_time.of(*scope(item.request, item.version)).observe(max(0, waited_ms) / 1000)
    else:
        _retries(item.request.model).inc()


GAUGES: dict[str, tuple[str, Callable[[Core], float]]] = {
    "headrace_requests_waiting": ("Requests admitted and not dispatched.", lambda core: core.admission.waiting),
    "headrace_requests_running": (
        "Requests dispatched and not settled.",
        lambda core: len(core.requests) - core.admission.waiting,
    ),
    "headrace_reserved_tokens": ("Tokens reserved by open requests.", lambda core: core.admission.reserved_tokens),
    "headrace_waiting_tokens": ("Tokens reserved by waiting requests.", lambda core: core.admission.waiting_tokens),
    "headrace_workers": ("Workers that are heard.", lambda core: len(core.pool.workers)),
    "headrace_ready_workers": (
        "Workers that can be given work.",
        lambda core: sum(map(core.pool.usable, list(core.pool.workers.values()))),
    ),
    "headrace_slots": (
        "Sequences that the workers run at once.",
        lambda core: sum(worker.beat.slots for worker in list(core.pool.workers.values())),
    ),
    "headrace_kv_tokens": (
        "Tokens that the workers' KV caches hold.",
        lambda core: sum(worker.beat.kv_tokens for worker in list(core.pool.workers.values())),
    ),
    "headrace_kv_tokens_used": (
        "Those of them that are in use.",
        lambda core: sum(worker.beat.kv_tokens_used for worker in list(core.pool.workers.values())),
    ),
    "headrace_prefix_blocks": (
        "Blocks of 64 prompt tokens that the workers' caches are expected to hold.",
        lambda core: core.pool.placement.index.blocks,
    ),
}
"""Name -> (help, figure of one model)."""


class Collector:
    """Figures of every model that this process owns; a standby exports none of them."""

    def __init__(self, cores: Callable[[], list[Core]], heartbeat_s: float) -> None:
        self._cores = cores
        self._heartbeat_s = heartbeat_s

    def register(self) -> None:
        """Show the figures on this process's metrics page."""
        REGISTRY.register(self)

    def describe(self) -> list[Metric]:
        """Nothing: the cores do not exist yet when the collector is registered."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What Prometheus reads now."""
        cores = self._cores()
        for name, (text, figure) in GAUGES.items():
            family = GaugeMetricFamily(name, text, labels=["model"])
            for core in cores:
                family.add_metric([core.model], figure(core))
            yield family
        silence = GaugeMetricFamily(
            "headrace_heartbeat_age_seconds",
            "Since the longest silent worker was heard, in the owner's own heartbeats.",
            labels=["model"],
        )
        lost = CounterMetricFamily("headrace_lost_workers", "Workers declared lost.", labels=["model"])
        refusals = CounterMetricFamily("headrace_refusals", "Refused admissions.", labels=["model", "code"])
        mended = CounterMetricFamily(
            "headrace_mended", "Differences from WORK and ATTEMPTS that were set right.", labels=["model", "stream"]
        )
        ended = CounterMetricFamily("headrace_requests_ended", "Settled requests.", labels=["model", "outcome"])
        skew = GaugeMetricFamily(
            "headrace_clock_skew_seconds",
            "How far a process's wall clock is ahead of the bus's, as its model's owner counts it.",
            labels=["model", "process"],
        )
        desired = GaugeMetricFamily(
            "headrace_desired_replicas", "Workers that the model should have; absent while unknown.", labels=["model"]
        )
        needed = GaugeMetricFamily(
            "headrace_needed_replicas", "Workers that it needs by each bound.", labels=["model", "bound"]
        )
        for core in cores:
            if (plan := core.replicas.plan).known:
                desired.add_metric([core.model], plan.desired)
            for bound, count in plan.needed.items():
                needed.add_metric([core.model, bound], count)
            missed = (core.pool.beats - worker.heard_at_beat for worker in list(core.pool.workers.values()))
            silence.add_metric([core.model], max(missed, default=0) * self._heartbeat_s)
            lost.add_metric([core.model], core.lost_workers)
            _retries(core.model)  # From the beginning, like the refusals: an increase from nothing is none.
            for news in ("stopped", "bad_worker"):
                _news(core.model, news)
            for code, count in (dict.fromkeys(_SOON, 0) | core.refusals).items():
                refusals.add_metric([core.model, code], count)
            for stream, count in core.mended.items():
                mended.add_metric([core.model, stream], count)
            for outcome, count in core.outcomes.items():
                ended.add_metric([core.model, outcome], count)
            for process, ahead_ms in core.clocks.ahead_ms().items():
                skew.add_metric([core.model, process], ahead_ms / 1000)
        yield from _prefixes(cores)
        yield from _rollouts(cores)
        yield from (desired, needed, silence, lost, refusals, mended, ended, skew)


def _prefixes(cores: list[Core]) -> Iterator[Metric]:
    """What placement expected of the workers' caches, and what was there."""
    families = [
        CounterMetricFamily(f"headrace_prefix_{name}_tokens", text, labels=["model"])
        for name, text in (
            ("prompt", "Of ended attempts that had a token."),
            ("expected", "Those expected in their worker's cache when it was chosen."),
            ("cached", "Those that its engine found there."),
        )
    ]
    for core in cores:
        found = core.pool.placement.found
        for family, tokens in zip(families, (found.prompt, found.expected, found.cached), strict=True):
            family.add_metric([core.model], tokens)
    gaps = CounterMetricFamily(
        "headrace_prefix_gaps", "Times that something of what workers tell of caches was missed.", labels=["model"]
    )
    for core in cores:
        gaps.add_metric([core.model], core.pool.cache_gaps)
    yield from (*families, gaps)


def _rollouts(cores: list[Core]) -> Iterator[Metric]:
    """Of the last roll-out of each model."""
    labels = ["model", "to"]
    share = GaugeMetricFamily("headrace_rollout_share", "Of requests that the new version gets, 0 to 1.", labels=labels)
    phase = GaugeMetricFamily("headrace_rollout_phase", "1 for the phase that it is in.", labels=[*labels, "phase"])
    served = GaugeMetricFamily(
        "headrace_rollout_requests", "Served, and compared, since it began.", labels=[*labels, "arm"]
    )
    bad = GaugeMetricFamily(
        "headrace_rollout_bad_requests", "Those of them that were bad.", labels=[*labels, "arm", "criterion"]
    )
    evidence = GaugeMetricFamily(
        "headrace_rollout_evidence",
        "Natural logarithm of the e-value against the new version, or for it.",
        labels=[*labels, "criterion", "side"],
    )
    spilled = CounterMetricFamily(
        "headrace_rollout_spilled", "Requests of the new version that went to the stable one.", labels=labels
    )
    for core in cores:
        if (rollout := core.versions.rollout) is None:
            continue
        of = [core.model, rollout.plan.to]
        share.add_metric(of, rollout.share)
        phase.add_metric([*of, rollout.phase], 1)
        spilled.add_metric(of, rollout.spilled)
        steps = list(rollout.judge.steps)
        served.add_metric([*of, "canary"], sum(step.canary for step in steps))
        served.add_metric([*of, "stable"], sum(step.stable for step in steps))
        for measure in rollout.judge.measures():
            bad.add_metric([*of, "canary", measure.criterion], measure.canary)
            bad.add_metric([*of, "stable", measure.criterion], measure.stable)
            evidence.add_metric([*of, measure.criterion, "against"], measure.log_against)
            evidence.add_metric([*of, measure.criterion, "for"], measure.log_for)
    yield from (share, phase, served, bad, evidence, spilled)
