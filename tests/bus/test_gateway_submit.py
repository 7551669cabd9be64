"""The NATS ingress: the same policy as HTTP, and reply subjects of one's own tenant only."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from contracts import subjects, topology
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.deliveries import Deliveries, Delivery
from contracts.messages.records import ModelRecord, TenantRecord
from contracts.messages.request import Reply, SubmitAnswer, SubmitRequest
from gateway.intake.bus_submit import SUBMITS_MAX
from tests.support.gateway_world import BASE, World, admitted, decode, encode, serve
from tests.support.polling import until

OWN = Reply(subject="reply.v1.T1.inbox", stream="7")


@pytest.fixture
async def world(nats_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with serve(nats_url, tmp_path) as world:
        yield world


async def submit(
    world: World, body: object = BASE, *, reply: Reply = OWN, subject: str = "", **fields: Any
) -> SubmitAnswer:
    request = SubmitRequest(endpoint="chat/completions", reply=reply, body=msgspec.Raw(encode(body)), **fields)
    data = await world.bus.request(subject or subjects.submit("T1", "m"), encode(request), timeout_s=10)
    return decode(data, type=SubmitAnswer)


async def test_a_request_is_admitted_and_its_frames_go_to_the_sender(world: World) -> None:
    got: list[bytes] = []
    await world.bus.subscribe(OWN.subject, lambda message: got.append(message.data))
    answer = await submit(world, BASE | {"stream": True}, deadline_ms=500, stream_owner="c-1")
    assert answer.admitted, answer
    [envelope] = world.stored
    assert envelope.request_id == answer.request_id
    assert (envelope.tenant, envelope.key_id, envelope.stream_owner) == ("T1", "bus", "T1.c-1")
    assert (envelope.reply, envelope.stream, envelope.prompt_tokens) == (OWN, True, 5)
    assert world.admissions[0].deadline_ms == 500


async def test_the_subjects_model_stands_in_and_must_not_differ(world: World) -> None:
    body = {name: value for name, value in BASE.items() if name != "model"}
    assert (await submit(world, body)).admitted
    answer = await submit(world, BASE | {"model": "other"})
    assert answer.error is not None
    assert (answer.status, answer.error.param) == (400, "model")


@pytest.mark.parametrize(
    "subject", ["reply.v1.T2.inbox", "reply.v1.T1", "reply.v1._gw.x", "$JS.API.X", "reply.v1.T1.*", "reply.v1.T1.>", ""]
)
async def test_a_reply_subject_must_be_the_tenants_own(world: World, subject: str) -> None:
    answer = await submit(world, reply=Reply(subject=subject, stream="7"))
    assert answer.error is not None
    assert (answer.admitted, answer.status, answer.error.code) == (False, 403, "permission_denied")
    assert world.admissions == []


async def test_refusals_are_those_of_http(world: World) -> None:
    async def code(body: object, **options: Any) -> tuple[int, str]:
        answer = await submit(world, body, **options)
        assert answer.error is not None
        return answer.status, answer.error.code

    assert await code(BASE | {"messages": []}) == (400, "invalid_request")
    assert await code([]) == (400, "invalid_request")
    assert await code(BASE | {"model": "no"}, subject=subjects.submit("T1", "no")) == (404, "model_not_found")
    assert await code(BASE | {"max_tokens": 5000}) == (400, "context_length_exceeded")
    assert await code(BASE, deadline_ms=0) == (400, "invalid_request")
    assert await code(BASE, subject=subjects.submit("nobody", "m")) == (403, "permission_denied")
    world.decide = lambda request: AdmissionAnswer(
        admitted=False, code="rate_limit_exceeded", message="Too many.", retry_after_s=3
    )
    answer = await submit(world)
    assert answer.error is not None
    assert (answer.status, answer.error.code, answer.error.retry_after_s) == (429, "rate_limit_exceeded", 3)
    assert world.stored == []


async def test_the_ledger_is_told_what_the_gateway_saw_of_each_submit(world: World) -> None:
    """Where its time at the edge went; of the refused ones why, of one without a tenant nothing."""
    told: list[Delivery] = []
    await world.bus.subscribe(
        subjects.DELIVERIES, lambda message: told.extend(decode(message.data, type=Deliveries).deliveries)
    )
    world.decide = lambda request: admitted(version="7")
    done = await submit(world, BASE | {"stream": True})
    bad = await submit(world, BASE | {"max_tokens": 5000})
    await submit(world, subject=subjects.submit("nobody", "m"))
    world.decide = lambda request: AdmissionAnswer(admitted=False, code="overloaded", message="Full.", retry_after_s=3)
    full = await submit(world)
    await until(lambda: len(told) >= 3, "the gateway has told")
    assert [(each.request_id, each.outcome, each.code, each.status) for each in told] == [
        (done.request_id, "submitted", "", 0),
        (bad.request_id, "refused", "context_length_exceeded", 400),
        (full.request_id, "refused", "overloaded", 529),
    ]
    first, second, third = told
    assert (first.tenant, first.key_id, first.model, first.version) == ("T1", "bus", "m", "7")
    assert (first.endpoint, first.stream, first.prompt_tokens) == ("chat/completions", True, 5)
    assert first.edge_ms and first.admission_ms and first.total_ms >= first.edge_ms + first.admission_ms
    assert (second.edge_ms, second.admission_ms, second.model) == (0, 0, "m")
    assert third.edge_ms and not third.admission_ms


async def test_garbage_and_disabled_tenants_are_answered(world: World) -> None:
    data = await world.bus.request(subjects.submit("T1", "m"), b"{", timeout_s=10)
    answer = decode(data, type=SubmitAnswer)
    assert answer.error is not None
    assert answer.status == 400
    await world.put_tenant(TenantRecord(name="T1", disabled=True))
    for _ in range(200):
        if not (answer := await submit(world)).admitted:
            break
    assert answer.status == 403


async def test_one_tenant_has_so_many_submits_under_way_and_others_have_theirs(world: World) -> None:
    """While the scheduler is slow with one tenant's, the next is refused at once, and another tenant is served."""
    await world.put_tenant(TenantRecord(name="T2"))
    world.decide = lambda request: None if request.tenant == "T1" else admitted()
    asked = [asyncio.create_task(submit(world)) for _ in range(SUBMITS_MAX)]
    await until(lambda: len({each.request_id for each in world.admissions}) == SUBMITS_MAX, "all are under way")
    before = REGISTRY.get_sample_value("headrace_submits_refused_total") or 0
    refused = await submit(world)
    assert REGISTRY.get_sample_value("headrace_submits_refused_total") == before + 1
    assert (refused.status, refused.error and refused.error.code) == (429, "rate_limit_exceeded")
    theirs = Reply(subject="reply.v1.T2.inbox", stream="7")
    answer = await submit(world, subject=subjects.submit("T2", "m"), reply=theirs)
    assert answer.admitted, answer
    world.decide = lambda request: admitted()
    await asyncio.gather(*asked)
    assert (await submit(world)).admitted


async def test_what_is_no_submit_is_answered_shortly_whatever_it_is(world: World) -> None:
    """Neither an echo of what was sent nor a broken handler."""
    for sent in (
        b'{"endpoint": "%s"}' % (b"x" * 1_000_000),
        b'{"endpoint": "chat/completions", "reply": {"subject": "a", "stream": "%s"}}' % (b"x" * 1_000_000),
        b'{"x": %s}' % (b"[" * 200_000),
        b'{"endpoint": "\xff"}',
        b"",
    ):
        data = await world.bus.request(subjects.submit("T1", "m"), sent, timeout_s=10)
        answer = decode(data, type=SubmitAnswer)
        assert (answer.status, len(data) < 1500) == (400, True), data[:200]


async def split(world: World) -> None:
    """Have ``m`` two shards, and wait until the gateway knows."""
    record = ModelRecord(name="m", stable="1", shards=2)
    await world.bus.kv.put(topology.MODELS, subjects.encode("m"), encode(record))

    async def both_chosen() -> bool:
        world.admissions.clear()
        await asyncio.gather(*(submit(world, conversation(number)) for number in range(8)))
        return {asked.model for asked in world.admissions} == {"m", "m#1"}

    await until(both_chosen)
    world.admissions.clear()
    world.stored.clear()


def conversation(number: int) -> dict[str, Any]:
    return BASE | {"messages": [{"role": "user", "content": f"conversation {number}"}]}


@pytest.mark.parametrize("silent", ["m", "m#1"])
async def test_what_a_silent_shard_would_have_had_goes_to_one_that_lives(world: World, silent: str) -> None:
    await split(world)
    world.decide = lambda asked: None if asked.model == silent else admitted()
    answers = await asyncio.gather(*(submit(world, conversation(number)) for number in range(8)))
    [living] = {"m", "m#1"} - {silent}
    assert all(answer.admitted for answer in answers)
    assert {answer.model for answer in answers} == {envelope.model for envelope in world.stored} == {living}
    assert silent in {asked.model for asked in world.admissions}, "it is asked first"


async def test_a_key_waits_for_the_shard_that_may_know_it(world: World) -> None:
    await split(world)
    silent = set[str]()

    def once_silent(asked: AdmissionRequest) -> AdmissionAnswer | None:
        if asked.request_id in silent:
            return admitted()
        silent.add(asked.request_id)
        return None

    world.decide = once_silent
    answers = await asyncio.gather(*(submit(world, BASE, idempotency_key=f"k-{number}") for number in range(8)))
    assert all(answer.admitted for answer in answers)
    asked: dict[str, set[str]] = {}
    for each in world.admissions:
        asked.setdefault(each.request_id, set()).add(each.model)
    assert all(len(models) == 1 for models in asked.values())
    assert {answer.model for answer in answers} == {"m", "m#1"}
