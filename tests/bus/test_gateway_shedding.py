"""A gateway whose event loop is late refuses what is new, ends what runs, and recovers."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client import REGISTRY

from contracts import subjects
from contracts.messages.request import Reply, RequestEnvelope, SubmitAnswer, SubmitRequest
from tests.support.gateway_world import BASE, CHAT, World, chunk, ended, error_of, events_of, serve, text_of
from tests.support.polling import until


@pytest.fixture
async def world(nats_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with serve(nats_url, tmp_path, shed_lag_s=0.5) as made:
        await until(lambda: not made.gateway.not_ready())
        yield made


def stand_still(seconds: float = 3.0) -> None:
    """The gateway's event loop, which is the test's, too."""
    time.sleep(seconds)


async def submitted(world: World) -> SubmitAnswer:
    reply = Reply(subject=subjects.tenant_reply_prefix("T1") + "x", stream="s")
    request = SubmitRequest(endpoint="chat/completions", body=msgspec.Raw(msgspec.json.encode(BASE)), reply=reply)
    data = await world.bus.request(subjects.submit("T1", "m"), msgspec.json.encode(request))
    return msgspec.json.decode(data, type=SubmitAnswer)


async def test_what_is_new_is_refused_unread_what_runs_ends_whole_and_then_it_takes_all_again(world: World) -> None:
    release = asyncio.Event()

    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, [("accepted", None), ("chunk", chunk("Hel"))])
        await release.wait()
        await world.send(envelope, [("chunk", chunk("lo")), ("end", ended())], first_seq=2)

    world.play = play
    async with world.client.stream("POST", CHAT, json=BASE | {"stream": True}) as running:
        await until(lambda: len(world.stored) == 1)
        stand_still()
        shed = REGISTRY.get_sample_value("headrace_shed_total") or 0
        await until(lambda: world.gateway.not_ready() == "more to do than it can")
        refused = await world.client.post(CHAT, content=b"no JSON, and nobody looks")
        error = error_of(refused)
        assert (refused.status_code, error["code"], error["type"]) == (529, "overloaded", "overloaded_error")
        assert int(refused.headers["retry-after"]) == 1
        assert (await world.client.get("/health/ready")).status_code == 503
        assert (await world.client.get("/health/live")).status_code == 200
        assert (await world.client.get("/v1/models")).status_code == 200, "what costs nothing is served"
        told = await submitted(world)
        assert (told.admitted, told.status, told.error and told.error.retry_after_s) == (False, 529, 1)
        assert len(world.admissions) == 1, "nobody was asked"
        assert REGISTRY.get_sample_value("headrace_shed_total") == shed + 2
        await until(lambda: not world.gateway.not_ready(), "it recovers by itself")
        release.set()
        events = events_of((await running.aread()).decode())
        assert text_of(events) == "Hello" and events[-1] == "[DONE]"
    world.play = world.play_hello
    assert (await world.post(BASE)).status_code == 200


async def test_a_moment_is_no_overload(world: World) -> None:
    stand_still(0.15)
    for _ in range(3):
        assert (await world.post(BASE)).status_code == 200
        await asyncio.sleep(0.1)


async def test_signs_of_life_go_on_while_the_loop_stands_still(world: World) -> None:
    """Six of them, and each says how late it is."""
    await until(lambda: len(world.beats) > 0)
    stand_still(3)
    await until(
        lambda: sum(beat.lag_ms > 0 for beat in world.beats) >= 4 and max(each.lag_ms for each in world.beats) > 2_000
    )
