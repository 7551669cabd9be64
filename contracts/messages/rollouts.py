"""Roll-outs of a model's new version: what the operator wants, how far the model's owner is, and what is told of it.

Both lie in the ROLLOUTS bucket, each with one writer: the plan under ``<model>``, the progress under
``<model>.progress``.
"""

from typing import Annotated, Literal

from msgspec import Meta

from contracts.messages.base import FEW, MANY, Line, Message, Name, Sealed, Text, Whole

Criterion = Literal["errors", "first_token", "pauses", "length", "empty"]
"""What makes a unit a bad one: an error or an engine's fault; a first token later than stable's 90th percentile for
prompts of that size; a pause between tokens longer than its 90th; an answer longer than its 95th, or ended by the
limit; an answer of nothing."""
CRITERIA: tuple[Criterion, ...] = ("errors", "first_token", "pauses", "length", "empty")

By = Literal["request", "tenant", "conversation"]
"""What keeps its side, and what bad events are counted by."""

Arm = Literal["", "stable", "canary", "shadow"]
"""Which version a request was given by a roll-out; empty: by none (a pin, or no roll-out)."""

Wanted = Literal["run", "pause", "promote", "abort"]

Phase = Literal["shadow", "live", "promoting", "promoted", "aborted", "stopped"]
"""``stopped``: by the judge. The last three are for good."""
OVER: frozenset[Phase] = frozenset(("promoted", "aborted", "stopped"))

SHADOW_TENANT = "_shadow"
"""Whose copies of requests are: no tenant's name, so that nobody pays for them."""

Percent = Annotated[float, Meta(ge=0, le=100)]


class RolloutPlan(Message, frozen=True, kw_only=True):
    """What the operator wants."""

    id: Name
    """Of this roll-out; its shares are drawn by it."""
    model: Name
    to: Name
    """The new version."""
    steps: Annotated[list[Percent], FEW]
    """Shares of the units, in percent, growing; at 100 the version becomes the stable one."""
    hold_ms: Whole
    """Shortest time of a step."""
    by: By = "request"
    tenants: Annotated[list[Name], MANY] = []
    """Only their requests; empty: all."""
    shadow: Percent = 0.0
    """Of requests of which the new version gets a copy before the first step; 0: there is no such step."""
    wanted: Wanted = "run"
    created_at_ms: int = 0


class Counted(Message, frozen=True, kw_only=True):
    """Bad units of one criterion in one step."""

    canary: Whole = 0
    events: Whole = 0
    """Of both versions."""


class WorkerEvidence(Message, frozen=True, kw_only=True):
    """What one worker of the new version did in one step."""

    requests: Whole = 0
    events: Annotated[dict[Criterion, Whole], FEW] = {}


class StepEvidence(Message, frozen=True, kw_only=True):
    """What was seen in one step."""

    share: float
    """Of all units, 0 to 1, that were the new version's."""
    canary: Whole = 0
    """Its units that were judged: served, or bad."""
    stable: Whole = 0
    criteria: Annotated[dict[Criterion, Counted], FEW] = {}
    workers: Annotated[dict[Name, WorkerEvidence], FEW] = {}


class Measure(Message, frozen=True, kw_only=True, omit_defaults=False):
    """How one criterion stands, for people."""

    criterion: Criterion
    canary: Whole
    """Bad units of the new version, over all steps."""
    stable: Whole
    log_against: float
    """ln e against the new version, over all steps; at ``log_stop`` it is stopped."""
    log_for: float
    """ln e' for it, in this step; at ``log_go_on`` the step may end."""
    log_stop: float
    log_go_on: float


class RolloutProgress(Message, frozen=True, kw_only=True):
    """How far it is, by the model's owner: enough for the next owner to go on from."""

    id: Name
    model: Name
    stable: Name
    """The version that was stable when it began."""
    to: Name
    phase: Phase
    step: int = 0
    """Index into the plan's steps."""
    held_ms: Whole = 0
    """Of the present step; it stands still while paused, or while the new version has no worker."""
    share: float = 0.0
    """Of units that the new version gets now, 0 to 1."""
    paused: bool = False
    evidence: Annotated[list[StepEvidence], FEW] = []
    """Oldest step first; the last one is the present one."""
    thresholds: Annotated[dict[Line, float], MANY] = {}
    """What is too late, too long: by criterion and workload class; milliseconds and tokens."""
    units: Sealed = b""
    """Hashes of the units that have been counted, four bytes each, by criterion."""
    bad_workers: Annotated[list[Name], FEW] = []
    """Of the new version, that are bad where its others are not: they get nothing more."""
    measures: Annotated[list[Measure], FEW] = []
    waits_for: Text = ""
    """Why the step does not end yet; empty when it is over."""
    reason: Text = ""
    """Why it is over, with the numbers."""
    spilled: Whole = 0
    """Requests that were the new version's and went to the stable one, for it had no worker or no room."""
    released: Annotated[list[Name], MANY] | None = None
    """Workers of the new version when it was over: they go with the stable one, also those started by name for it."""
    ended_at_ms: int = 0


RolloutNews = Literal["started", "step", "paused", "resumed", "bad_worker", "promoted", "aborted", "stopped"]


class RolloutEvent(Message, frozen=True, kw_only=True):
    """Scheduler -> whoever listens, ``rollout.v1.<model>``, kept in the stream ROLLOUT_EVENTS."""

    id: Name
    model: Name
    news: RolloutNews
    stable: Name
    to: Name
    share: float
    """Of units that the new version gets from now on, 0 to 1."""
    at_ms: int
    """By the owner's clock."""
    reason: Text = ""
    measures: Annotated[list[Measure], FEW] = []
