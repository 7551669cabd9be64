"""What is simulated: a TOML file with models, their workers and demand, tenants' limits, and failures."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from contracts.messages.records import PoolLimits, TenantLimits
from simulator.traces import TRACES, Lengths, Lognormal

Positive = Annotated[float, Meta(gt=0, le=1e9)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Times = Annotated[float, Meta(ge=0, le=1e6)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Whole = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Milliseconds = Annotated[float, Meta(ge=0, le=600_000)]


class BadScenario(ValueError):
    """The file is no scenario; the message names the field."""


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file; an unknown field is an error."""


class Timing(Part, frozen=True, kw_only=True):
    """A worker's engine."""

    slots: Count = 64
    kv_tokens: Annotated[int, Meta(ge=1, le=1_000_000_000)] = 500_000
    prefill_tps: Positive = 8_000.0
    """Prompt tokens a second, one prompt after the other."""
    itl_ms: Positive = 20.0
    """Between two tokens of a sequence."""
    start_s: Seconds = 60.0
    """From start to ready, of those that are started later."""
    cost_per_hour: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class LogNormalLength(Part, frozen=True, kw_only=True):
    """A length in tokens: e to the power of a normal variable."""

    mu: Annotated[float, Meta(ge=0, le=20)]
    sigma: Annotated[float, Meta(ge=0, le=10)] = 0.0


class Demand(Part, frozen=True, kw_only=True):
    """What callers ask of a model."""

    rate: Positive = 1.0
    """Conversations that begin a second, over the whole day where it varies."""
    arrivals: Literal["poisson", "gamma", "mmpp", "daily"] = "poisson"
    burstiness: Positive = 0.25
    """Shape of the gamma distributed gaps: below 1 they come in bursts."""
    burst_factor: Annotated[float, Meta(ge=1, le=1e6)] = 5.0
    """mmpp: the rate of a burst over the rate between bursts."""
    burst_share: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """mmpp: of time."""
    burst_s: Positive = 30.0
    """mmpp: mean length of a burst."""
    day_s: Positive = 86_400.0
    """daily: one period."""
    day_swing: Annotated[float, Meta(ge=0, le=1)] = 0.8
    """daily: the rate goes from (1 - swing) to (1 + swing) times its mean."""
    steps: list[tuple[Seconds, Times]] = []
    """(from second, times the rate): one after the other, on top of the above; the last one is not 0."""
    lengths: Literal["azure-conversation", "azure-code", "mooncake-conversation"] = "azure-conversation"
    prompt: LogNormalLength | None = None
    """In place of the trace's."""
    output: LogNormalLength | None = None
    longest: Annotated[int, Meta(ge=1, le=10_000_000)] = 32_768
    """Prompts and answers are cut there."""
    tenants: Count = 10
    tenant_skew: Annotated[float, Meta(ge=0, le=10)] = 0.0
    """Of Zipf's law: 0, all ask as often; 1, the second half as often as the first."""
    turns: Count = 1
    think_s: Seconds = 10.0
    """Mean time from an answer to the next turn."""
    system_prompts: Whole = 0
    """Shared by the conversations of all tenants, each of which has its own cache of them."""
    system_tokens: Annotated[int, Meta(ge=0, le=10_000_000)] = 0
    system_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Of conversations that take the first one; the others take any."""
    trace: str = ""
    """File of JSON lines in Mooncake's form, in place of all of this but the tenants; relative to the scenario."""
    batch_share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Of requests with the priority batch."""
    deadline_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 60_000
    """To the first token."""
    patience: Annotated[int, Meta(ge=0, le=20)] = 2
    """How often a caller that was refused asks again, after Retry-After."""

    def drawn(self) -> Lengths:
        """Of prompt and output."""
        trace = TRACES[self.lengths]
        return Lengths(
            trace.prompt if self.prompt is None else Lognormal(self.prompt.mu, self.prompt.sigma),
            trace.output if self.output is None else Lognormal(self.output.mu, self.output.sigma),
        )


class Model(Part, frozen=True, kw_only=True):
    """A model with its workers and its callers. Workers stand in cells and hosts one after the other."""

    name: str
    workers: Count = 1
    autoscale: tuple[Whole, Count] | None = None
    """Least and most workers; None: as many as there are."""
    scale_by: Literal["tokens", "in_flight", "queued"] = "tokens"
    """tokens: by what the model's owner plans. For comparison by counts of requests, as Kubernetes does it: of all that
    are open, or of those that wait."""
    requests_per_worker: Positive = 16.0
    """With which of them a worker is meant to have."""
    worker: Timing = Timing()
    demand: Demand | Annotated[list[Demand], Meta(min_length=1, max_length=100)] = Demand()
    """Several kinds of callers come independently."""
    limits: PoolLimits = PoolLimits()

    @property
    def demands(self) -> list[Demand]:
        """Each kind of callers."""
        return [self.demand] if isinstance(self.demand, Demand) else self.demand


class Failure(Part, frozen=True, kw_only=True):
    """Workers that die at once, and are there again later."""

    at_s: Seconds
    what: Literal["worker", "host", "cell"]
    number: Whole = 0
    """Of the host or cell; of the worker, within its model."""
    model: str = ""
    """Only of that model; empty: of all."""
    for_s: Positive = 60.0
    """Until they are started again."""


class ServiceLevel(Part, frozen=True, kw_only=True):
    """What counts as good."""

    ttft_ms: Positive = 2_000.0
    tpot_ms: Positive = 100.0


class Delays(Part, frozen=True, kw_only=True):
    """Of the way: what gateways and bus take."""

    gateway_ms: Milliseconds = 2.0
    bus_ms: Milliseconds = 1.0


class Scenario(Part, frozen=True, kw_only=True):
    """A whole run; the seed decides all of it."""

    models: Annotated[list[Model], Meta(min_length=1, max_length=1_000)]
    seed: int = 1
    requests: Annotated[int, Meta(ge=1, le=100_000_000)] = 10_000
    """In all; callers stop there."""
    tenant_limits: TenantLimits = TenantLimits()
    """Of every tenant, for each model."""
    failures: list[Failure] = []
    service_level: ServiceLevel = ServiceLevel()
    delays: Delays = Delays()
    heartbeat_ms: Annotated[int, Meta(ge=100, le=10_000)] = 500
    """Of workers and owners; six that are missing make a loss."""
    cells: Count = 1
    workers_per_host: Count = 8


def load(path: Path) -> Scenario:
    """Raises BadScenario and OSError."""
    try:
        scenario = msgspec.toml.decode(path.read_bytes(), type=Scenario)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadScenario(f"{path}: {error}") from error
    names = [model.name for model in scenario.models]
    for model in scenario.models:
        if names.count(model.name) > 1:
            raise BadScenario(f"{path}: there are two models {model.name!r}")
        if model.autoscale is not None and model.autoscale[0] > model.autoscale[1]:
            raise BadScenario(f"{path}: autoscale of {model.name!r} is [least, most]")
        for demand in model.demands:
            if [at_s for at_s, _ in demand.steps] != sorted(at_s for at_s, _ in demand.steps):
                raise BadScenario(f"{path}: steps of {model.name!r} are not in the order of their seconds")
            if demand.steps and not demand.steps[-1][1]:
                raise BadScenario(f"{path}: the last step of {model.name!r} is 0 times the rate: it would never end")
    for failure in scenario.failures:
        if failure.model and failure.model not in names:
            raise BadScenario(f"{path}: a failure names {failure.model!r}, which is none of the models")
    return scenario
