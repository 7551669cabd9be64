"""A model of several shards: their names, who owns which request, and admission by two owners under one limit."""

from collections import Counter
from typing import Any

import pytest

from contracts import shards
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.base import Epoch
from contracts.messages.control import WorkerHeartbeat
from contracts.messages.queues import QueueAnswer, Replicas, TenantQueue, merged
from contracts.messages.records import ModelRecord, SharedQuota, TenantLimits, TenantRecord
from contracts.subjects import decode, encode
from scheduler.core import events
from scheduler.core.core import Core
from scheduler.core.quota_leases import exchange
from scheduler.core.settings import Settings

NOW_MS = 1_790_000_000_000


@pytest.mark.parametrize("model", ["m", "a/b", "m#x", "m#0", "m##", "größe#", "m#123"])
def test_a_shard_has_a_name_of_its_own_on_the_bus(model: str) -> None:
    names = shards.names(model, shards.SHARDS_MAX)
    assert names[0] == model and len(set(map(encode, names))) == shards.SHARDS_MAX
    assert [shards.model_of(decode(encode(name))) for name in names] == [model] * len(names)
    assert [shards.number_of(name) for name in names] == list(range(len(names)))


def test_each_key_has_its_shard_and_keeps_it_unless_a_new_one_takes_it() -> None:
    keys = [f"tenant {number}" for number in range(2_000)]
    before = {key: shards.choose("m", 3, key) for key in keys}
    assert set(Counter(before.values()).values()) <= set(range(600, 740))
    after = {key: shards.choose("m", 4, key) for key in keys}
    moved = {key for key in keys if before[key] != after[key]}
    assert {after[key] for key in moved} == {"m#3"} and 430 <= len(moved) <= 570
    assert {shards.choose("m", 1, key) for key in keys} == {"m"}


def test_a_key_turns_to_all_other_shards_and_those_of_one_shard_to_different_ones() -> None:
    keys = [f"tenant {number}" for number in range(300)]
    second: dict[str, set[str]] = {}
    for key in keys:
        first, others = shards.choose("m", 4, key), shards.others("m", 4, key)
        assert sorted([first, *others]) == shards.names("m", 4)
        second.setdefault(first, set()).add(others[0])
    assert all(turned_to == {*shards.names("m", 4)} - {first} for first, turned_to in second.items())
    assert shards.others("m", 1, "key") == []


def test_shards_are_shown_as_one_model() -> None:
    def answer(model: str, waiting: int, *tenants: str, reason: str) -> QueueAnswer:
        lines = [
            TenantQueue(
                tenant=name,
                waiting=waiting,
                waiting_tokens=10,
                running=1,
                reserved_tokens=20,
                served_counter=3.0,
                oldest_wait_ms=waiting,
            )
            for name in tenants
        ]
        worker = WorkerHeartbeat(worker=f"w-{model}", model=model, version="v1", state="ready")
        plan = Replicas(model=model, desired=waiting, reason=reason, needed={"slots": 1.5}, ready=1)
        return QueueAnswer(
            model=model,
            owner=f"s-{model}",
            epoch=Epoch(1, 1),
            waiting=waiting,
            running=1,
            reserved_tokens=20,
            workers=[worker],
            tenants=lines,
            replicas=plan,
        )

    one = merged([answer("m", 2, "a", "b", reason="slots"), answer("m#1", 5, "b", reason="throughput")])
    assert (one.model, one.waiting, one.running, one.reserved_tokens, len(one.workers)) == ("m", 7, 2, 40, 2)
    assert {line.tenant: (line.waiting, line.oldest_wait_ms) for line in one.tenants} == {"a": (2, 2), "b": (7, 5)}
    plan = one.replicas
    assert (plan.model, plan.desired, plan.reason, plan.ready, plan.needed) == ("m", 7, "throughput", 2, {"slots": 3.0})
    assert not merged([answer("m", 2, reason="slots"), answer("m#1", 1, reason="unknown")]).replicas.known


class Owners:
    """Two owners of one model, and the record that they share."""

    def __init__(self, limits: TenantLimits) -> None:
        record = ModelRecord(name="m", stable="v1", shards=2)
        self.cores = [
            Core(
                model=name,
                owner=f"s-{name}",
                epoch=Epoch(1, 1),
                record=ModelRecord(name=name, stable="v1", shards=record.shards),
                settings=Settings(),
                now_ms=NOW_MS,
            )
            for name in shards.names("m", 2)
        ]
        self.shared: SharedQuota | None = None
        self.answers: dict[str, AdmissionAnswer] = {}
        self.cut_off = False
        for core in self.cores:
            self.feed(core, events.TenantChanged("t", TenantRecord(name="t", limits=limits)))
            self.feed(core, events.Recovered())

    def feed(self, core: Core, event: events.Event, now_ms: int = NOW_MS) -> None:
        for effect in core.step(event, now_ms):
            match effect:
                case events.AnswerAdmission(handle, answer):
                    self.answers[handle] = answer
                case events.ExchangeLease(tenant, ask):
                    grant = None
                    if not self.cut_off:
                        self.shared, grant = exchange(self.shared, core.model, ask, now_ms)
                    self.feed(core, events.LeaseExchanged(tenant, grant), now_ms)

    def ask(self, core: Core, number: int, **fields: Any) -> AdmissionAnswer | None:
        asked = AdmissionRequest(
            request_id=f"r{number}",
            tenant="t",
            key_id="k",
            model=core.model,
            endpoint="chat/completions",
            prompt_tokens=10,
            max_output_tokens=10,
            **fields,
        )
        self.feed(core, events.AdmissionAsked(asked, asked.request_id))
        return self.answers.get(asked.request_id)


@pytest.mark.parametrize(
    "limits", [TenantLimits(rpm=10), TenantLimits(concurrency=10), TenantLimits(input_tpm=100), TenantLimits()]
)
def test_two_owners_admit_together_what_the_limit_allows_and_no_more(limits: TenantLimits) -> None:
    owners = Owners(limits)
    answers = [owners.ask(owners.cores[number % 2], number) for number in range(40)]
    admitted = [answer for answer in answers if answer is not None and answer.admitted]
    assert all(answer is not None for answer in answers)
    allowed = 40 if limits == TenantLimits() else 10
    assert allowed - (limits.input_tpm is not None) <= len(admitted) <= allowed, "a part of one is leased to either"
    assert {answer.code for answer in answers if answer and not answer.admitted} <= {"rate_limit_exceeded"}
    assert all(core.admission.quotas["t"].open for core in owners.cores), "both have admitted some"


def test_nobody_is_answered_by_guess_while_the_record_is_out_of_reach() -> None:
    owners = Owners(TenantLimits(rpm=10))
    owners.cut_off = True
    assert owners.ask(owners.cores[1], 1) is None
    owners.cut_off = False
    answer = owners.ask(owners.cores[1], 1)
    assert answer is not None and answer.admitted
    again = owners.ask(owners.cores[1], 1)
    assert again is not None and again.admitted and owners.cores[1].admission.quotas["t"].open == 1
