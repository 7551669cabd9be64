"""Random histories of the scheduler's core: every request ends once, nothing leaks, no token is lost or given twice."""

import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from contracts.messages.control import CancelRequest, StreamOwnerHeartbeat
from contracts.messages.frames import ErrorData
from contracts.messages.records import TenantLimits, TenantRecord
from scheduler.core import events
from tests.support.scheduler_world import EPOCH, LIMITS, WELL, World

ERROR = msgspec.json.Decoder(ErrorData)

QUEUE = {"queued_requests": 40, "tenant_queued_requests": 20}
fates = st.lists(st.integers(0, WELL), max_size=12)
some = st.integers(0, 1000)
"""One of those that there are."""


class Histories(RuleBasedStateMachine):
    """Callers, workers and time, in any order; the world checks the core after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(limits=QUEUE)

    @rule(
        tenant=st.sampled_from(sorted(LIMITS)),
        prompt_tokens=st.integers(1, 3000),
        max_output_tokens=st.integers(1, 500),
        choices=st.sampled_from([1, 1, 1, 2]),
        stream=st.booleans(),
        priority=st.sampled_from(["interactive", "batch"]),
        deadline_ms=st.sampled_from([None, 500, 20_000]),
        stream_owner=st.sampled_from(["", "g1", "g2"]),
        body_bytes=st.sampled_from([0, 0, 70_000]),
        published=st.booleans(),
    )
    def ask(self, published: bool, **fields: object) -> None:
        if published:
            self.world.submit(**fields)
        else:
            self.world.ask(**fields)

    @precondition(lambda self: self.world.unpublished)
    @rule(which=some)
    def publish(self, which: int) -> None:
        self.world.publish(self.world.unpublished[which % len(self.world.unpublished)])

    @precondition(lambda self: self.world.unpublished)
    @rule(which=some)
    def never_publish(self, which: int) -> None:
        self.world.unpublished.pop(which % len(self.world.unpublished))

    @precondition(lambda self: self.world.requests)
    @rule(which=some)
    def deliver_again(self, which: int) -> None:
        seq = list(self.world.requests)[which % len(self.world.requests)]
        self.world.feed(events.RequestStored(self.world.requests[seq], seq, self.world.now))

    @precondition(lambda self: self.world.asked)
    @rule(which=some, stranger=st.booleans())
    def cancel(self, which: int, stranger: bool) -> None:
        asked = list(self.world.asked.values())[which % len(self.world.asked)]
        tenant = "stranger" if stranger else asked.tenant
        self.world.feed(events.CancelAsked(tenant, CancelRequest(request_id=asked.request_id), None))

    @rule(leaving=st.booleans())
    def stream_owner_is_heard(self, leaving: bool) -> None:
        self.world.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner="g1", leaving=leaving)))

    @rule(tenant=st.sampled_from(sorted(LIMITS)), limits=st.sampled_from(list(LIMITS.values())))
    def limits_change(self, tenant: str, limits: TenantLimits) -> None:
        self.world.feed(events.TenantChanged(tenant, TenantRecord(name=tenant, limits=limits)))

    @precondition(lambda self: sum(worker.alive for worker in self.world.workers) < 3)
    @rule(slots=st.integers(1, 4), kv_tokens=st.sampled_from([4000, 20_000]))
    def start_worker(self, slots: int, kv_tokens: int) -> None:
        self.world.start_worker(slots, kv_tokens)

    @precondition(lambda self: self.world.workers)
    @rule(which=some)
    def kill_worker(self, which: int) -> None:
        self.world.workers[which % len(self.world.workers)].alive = False

    @precondition(lambda self: self.world.workers)
    @rule(which=some)
    def freeze_or_wake_worker(self, which: int) -> None:
        worker = self.world.workers[which % len(self.world.workers)]
        worker.frozen = not worker.frozen

    @rule(fates=fates)
    def take_over(self, fates: list[int]) -> None:
        self.world.fates.extend(fates)
        self.world.takeover()

    @rule(span_ms=st.sampled_from([1, 20]), fates=fates)
    def moments_pass(self, span_ms: int, fates: list[int]) -> None:
        self.world.pass_time(span_ms, fates)

    @rule(span_ms=st.sampled_from([100, 500]), fates=fates)
    def time_passes(self, span_ms: int, fates: list[int]) -> None:
        self.world.pass_time(span_ms, fates)

    @rule(times=st.integers(2, 8), fates=fates)
    def seconds_pass(self, times: int, fates: list[int]) -> None:
        self.world.fates.extend(fates)
        for _ in range(times):
            self.world.pass_time(500)

    def teardown(self) -> None:
        if self.world.sound:  # Else the failure is known, and this would hide it.
            self.world.settle()
            check_ends(self.world)


def check_ends(world: World) -> None:
    core = world.core
    assert core.admission.reserved_tokens == core.admission.waiting == core.admission.waiting_tokens == 0
    assert all(quota.open == 0 for quota in core.admission.quotas.values())
    assert not world.requests, "nothing is left in REQUESTS"
    if world.core.epoch == EPOCH:  # Else what the owner before did not come to delete is the sweep's.
        assert not world.bodies, "nothing is left in BODIES"
    for request_id, asked in world.asked.items():
        ends = [event for (found, _), event in world.attempts.items() if found == request_id]
        final = [e for e in ends if e.outcome != "lost" and not (e.outcome == "failed" and e.retryable)]
        assert len(final) <= 1, ends
        assert sum(event.billable for event in ends) <= 1
        if not world.answers[request_id].admitted:
            assert not ends
        errors = [ERROR.decode(f.data).code for f in world.frames.get(request_id, []) if f.kind == "error"]
        assert len(set(errors)) <= 1, "an owner may repeat what the one before said, and nothing else"
        assert all(event.tenant == asked.tenant for event in ends)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=150, stateful_step_count=60, deadline=None, report_multiple_bugs=False)


def wander(seed: int, steps: int) -> World:
    """A history drawn by a seed, where only its repetition counts."""
    rng = random.Random(seed)
    world = World(limits=QUEUE)
    for _ in range(steps):
        drawn = [rng.randrange(WELL + 1) for _ in range(6)]
        if drawn[0] < 40:
            world.submit(
                tenant=rng.choice(sorted(LIMITS)),
                prompt_tokens=10 * drawn[1] + 1,
                stream=drawn[2] < 70,
                stream_owner=rng.choice(["", "g1"]),
            )
        elif drawn[0] < 50 and sum(worker.alive for worker in world.workers) < 3:
            world.start_worker(1 + drawn[1] % 4)
        elif drawn[0] < 52 and world.workers:
            rng.choice(world.workers).alive = False
        elif drawn[0] < 54:
            world.takeover()
        else:
            world.pass_time(rng.choice([1, 20, 100, 500]), drawn)
    world.settle()
    return world


def test_a_history_repeats_itself_whatever_strings_hash_to() -> None:
    program = (
        "from tests.unit.test_scheduler_histories import wander;"
        "made = wander(11, 400); print(made.number, made.digest.hexdigest())"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert int(said[0].split()[0]) > 300
    assert said[0] == said[1] == said[2]
