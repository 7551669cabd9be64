"""Streams between a scripted worker and real HTTP callers: order, repair, hang-ups, keep-alive, ends."""

import asyncio
import time
from collections.abc import AsyncIterator
from operator import sub
from pathlib import Path

import httpx
import openai
import pytest

from contracts.messages.control import StatusAnswer
from contracts.messages.frames import AcceptedData, EndData, ErrorData, LostData
from contracts.messages.request import RequestEnvelope
from gateway.streams import stream as gateway_stream
from tests.support.gateway_world import (
    BASE,
    CHAT,
    K1,
    MODEL,
    Content,
    Raw,
    World,
    admitted,
    answer,
    chunk,
    encode,
    ended,
    error_of,
    events_of,
    serve,
    text_of,
)
from tests.support.polling import metric, until

STREAM = BASE | {"stream": True}


@pytest.fixture
async def world(nats_url: str, tmp_path: Path) -> AsyncIterator[World]:
    async with serve(nats_url, tmp_path, hold_s=0.5) as world:
        yield world


# Figures ---------------------------------------------------------------------------------------------------


async def test_streams_and_failures_are_counted_and_timed(world: World) -> None:
    names = {
        "headrace_http_requests_total": {"route": CHAT, "status": "200"},
        "headrace_http_errors_total": {"code": "engine_error"},
        "headrace_prompt_counting_seconds_count": {},
        "headrace_requests_total": {"model": MODEL, "priority": "interactive", "workload": "short"},
        "headrace_e2e_request_latency_seconds_count": {"model": MODEL},
        "headrace_e2e_request_latency_seconds_sum": {"model": MODEL},
        "headrace_time_to_first_token_seconds_count": {"model": MODEL},
        "headrace_time_to_first_token_seconds_sum": {"model": MODEL},
        "headrace_inter_token_latency_seconds_count": {"model": MODEL},
        "headrace_request_phase_seconds_count": {"phase": "admission"},
    }

    def figures() -> list[float]:
        return [metric(name, **labels) for name, labels in names.items()]

    under_way = []

    async def play(envelope: RequestEnvelope) -> None:
        under_way.append(metric("headrace_streams"))
        await asyncio.sleep(0.2)
        await world.send(envelope, answer("a", "b", "c"))

    world.play = play
    before = figures()
    await world.post(STREAM)
    world.play = lambda envelope: world.send(envelope, [("error", ErrorData(code="engine_error", message="No."))])
    await world.post(BASE)
    await until(lambda: metric("headrace_streams") == 0)
    served, failed, counted, ended_, completed, took_s, first, first_s, gaps, asked = map(sub, figures(), before)
    assert under_way == [1]
    assert (served, failed, counted, ended_, completed, first, gaps, asked) == (1, 1, 2, 2, 1, 1, 2, 2)
    assert 0.2 < first_s < 2 and first_s < took_s < 4


async def test_the_version_is_told_by_who_answers_and_not_told_where_nobody_has_said_it(world: World) -> None:
    """What waits may be given another version than at its admission, as when that one is stopped."""
    contents: list[Content] = [("accepted", AcceptedData(version="v9")), ("chunk", chunk("a")), ("end", ended(1))]
    world.play = lambda envelope: world.send(envelope, contents)
    assert (await world.post(STREAM)).headers["x-headrace-model"] == "m@v9"
    world.play = lambda envelope: world.send(envelope, [("accepted", None), *contents[1:]])
    assert "x-headrace-model" not in (await world.post(STREAM)).headers
    world.play = lambda envelope: world.send(envelope, [contents[0], ("chunk", {"id": "chatcmpl-1"}), contents[2]])
    assert (await world.post(BASE)).headers["x-headrace-model"] == "m@v9"


# Order and repair ------------------------------------------------------------------------------------------


async def test_c16_many_streams_at_once_miss_nothing(world: World) -> None:
    words = [f"{number} " for number in range(20)]

    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, answer(envelope.request_id, *words))

    world.play = play

    async def ask() -> None:
        response = await world.post(STREAM)
        assert text_of(events_of(response.text)) == response.headers["x-request-id"] + "".join(words)

    for _ in range(3):
        await asyncio.gather(*(ask() for _ in range(50)))
    assert world.asked_frames == []


async def test_c16_frames_that_got_lost_are_asked_for(world: World) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, answer("a", "b", "c", "d"), lose=[2, 3])

    world.play = play
    response = await world.post(STREAM)
    assert text_of(events_of(response.text)) == "abcd"
    assert world.asked_frames


async def test_a_lost_tail_is_found_by_asking_the_scheduler(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = answer("a", "b")

    async def play(envelope: RequestEnvelope) -> None:
        world.status = StatusAnswer(
            state="ended", attempt=1, worker="w-1", outcome="completed", last_seq=len(contents) - 1
        )
        await world.send(envelope, contents, lose=[2, 3])

    world.play = play
    response = await world.post(STREAM)
    assert text_of(events_of(response.text)) == "ab"
    assert events_of(response.text)[-1] == "[DONE]"


async def test_a_large_answer_comes_in_parts(world: World) -> None:
    whole = encode({"id": "x", "text": "y" * 300_000}).decode()

    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, [("part", whole[:200_000]), ("chunk", whole[200_000:]), ("end", ended())])

    world.play = play
    assert (await world.post(BASE)).text == whole


# Ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_c17_a_failure_before_the_first_token_is_a_plain_error(world: World, stream: bool) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        error = ErrorData(code="engine_error", message="The engine failed.")
        await world.send(envelope, [("accepted", None), ("error", error)])

    world.play = play
    response = await world.post(BASE | {"stream": stream})
    assert response.status_code == 500
    assert error_of(response)["code"] == "engine_error"


async def test_the_workers_status_wins_over_the_tables(world: World) -> None:
    error = ErrorData(code="engine_error", message="No.", param="x", status=422)
    world.play = lambda envelope: world.send(envelope, [("error", error)])
    response = await world.post(STREAM)
    assert (response.status_code, error_of(response)["param"]) == (422, "x")


async def test_c17_a_failure_after_tokens_is_the_last_event(world: World) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, [*answer("a", "b")[:-1]])
        await asyncio.sleep(0.1)
        await world.fail(envelope, ErrorData(code="worker_lost", message="The worker was lost."))

    world.play = play
    response = await world.post(STREAM)
    assert response.status_code == 200
    events = events_of(response.text)
    assert text_of(events[:-1]) == "ab"
    error = events[-1]["error"]
    assert (error["code"], error["type"]) == ("worker_lost", "server_error")
    assert error["request_id"] == response.headers["x-request-id"]
    assert error["attempt"] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_c17_another_worker_answers_when_one_was_lost_before_its_first_token(world: World, stream: bool) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, [("accepted", None)])
        await world.send(envelope, [("lost", LostData(retry=True))], worker="")
        if stream:
            await world.send(envelope, answer("clean"), attempt=2, worker="w-2")
        else:
            await world.send(envelope, [("chunk", {"id": 2}), ("end", ended())], attempt=2, worker="w-2")

    world.play = play
    response = await world.post(BASE | {"stream": stream})
    assert response.status_code == 200
    if stream:
        assert text_of(events_of(response.text)) == "clean"
    else:
        assert response.json() == {"id": 2}


async def test_a_generation_cancelled_by_another_hand_does_not_look_finished(world: World) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, [*answer("a")[:-1], ("end", EndData(outcome="cancelled"))])

    world.play = play
    events = events_of((await world.post(STREAM)).text)
    assert events[-1]["error"]["code"] == "cancelled"


async def test_a_stream_that_cannot_be_repaired_ends_with_an_error_and_is_cancelled(world: World) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        await world.send(envelope, answer("a")[:-1])
        world.status = StatusAnswer(state="unknown")

    world.play = play
    events = events_of((await world.post(STREAM)).text)
    assert events[-1]["error"]["code"] == "stream_interrupted"
    await until(lambda: world.cancelled)


# Callers that leave ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_c01_a_hang_up_cancels_the_generation(world: World, stream: bool) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        if stream:
            await world.send(envelope, answer("a")[:-1])

    world.play = play
    world.undurable = 2
    raw = await Raw.open(world)
    await raw.post(BASE | {"stream": stream})
    await until(lambda: world.stored)
    if stream:
        assert (await raw.head())[0] == 200
    assert world.cancelled == []
    await raw.close()
    await until(lambda: len(world.cancelled) == 3, limit_s=5)  # Repeated until it is durable.
    assert {cancel.request_id for cancel in world.cancelled} == {world.stored[0].request_id}
    assert world.cancelled[0].reason == "client_disconnected"
    world.play = world.play_hello
    assert (await world.post(BASE)).status_code == 200
    assert len(world.cancelled) == 3


async def test_c20_callers_that_leave_while_queued_are_cancelled(world: World) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        pass

    world.play = play
    waiting = [await Raw.open(world) for _ in range(20)]
    for raw in waiting:
        await raw.post(STREAM)
    await until(lambda: len(world.stored) == 20)
    live = waiting.pop()
    for raw in waiting[:10]:
        await raw.close()
    for raw in waiting[10:]:
        assert (await raw.head())[0] == 200  # Held back for hold_s, then committed.
        await raw.close()
    await until(lambda: len({cancel.request_id for cancel in world.cancelled}) == 19)
    [left] = {envelope.request_id for envelope in world.stored} - {c.request_id for c in world.cancelled}
    [envelope] = [envelope for envelope in world.stored if envelope.request_id == left]
    await world.send(envelope, answer("done"))
    assert (await live.head())[0] == 200
    assert b"[DONE]" in await live.reader.readuntil(b"[DONE]")
    await live.close()


async def test_a_caller_that_leaves_during_admission_is_forgotten(world: World) -> None:
    world.decide = lambda request: None
    raw = await Raw.open(world)
    await raw.post(STREAM)
    await until(lambda: world.admissions)
    await raw.close()
    await until(lambda: world.cancelled)
    world.decide = lambda request: admitted()
    await asyncio.sleep(0.3)
    assert world.stored == []


async def test_c20_a_deadline_that_passes_is_a_plain_error(world: World) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        await asyncio.sleep(0.1)
        await world.fail(envelope, ErrorData(code="deadline_exceeded", message="Too late."), attempt=0)

    world.play = play
    response = await world.post(STREAM)
    assert (response.status_code, error_of(response)["code"]) == (504, "deadline_exceeded")


async def test_a_finished_request_is_never_cancelled(world: World) -> None:
    for stream in (True, False):
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {K1}"}) as client:
            assert (await client.post(world.url + CHAT, json=BASE | {"stream": stream})).status_code == 200
    await asyncio.sleep(0.2)
    assert world.cancelled == []


async def test_c16_a_reader_that_is_too_slow_is_cut_off_and_others_are_not(nats_url: str, tmp_path: Path) -> None:
    async with serve(nats_url, tmp_path, stream_bytes_max=200_000) as world:
        big = "x" * 20_000

        async def play(envelope: RequestEnvelope) -> None:
            if envelope.client_request_id != "slow":
                await asyncio.sleep(0.2)
                await world.play_hello(envelope)
                return
            await world.send(envelope, [("accepted", None)])
            for number in range(1000):
                await world.send(envelope, [("chunk", chunk(big))], first_seq=number + 1)
                if world.cancelled:
                    break

        world.play = play
        raw = await Raw.open(world, limit=4096)
        data = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"hi"}]}'
        await raw.send(f"POST {CHAT} HTTP/1.1\r\nx-request-id: slow\r\ncontent-length: {len(data)}", data)
        others = await asyncio.gather(*(world.post(STREAM) for _ in range(10)))
        assert all(text_of(events_of(other.text)) == "Hello" for other in others)
        await until(lambda: world.cancelled)
        assert world.cancelled[0].reason == "slow_reader"
        text = b""
        async with asyncio.timeout(20):
            while b"slow_reader" not in text[-4096:]:
                text += await raw.reader.read(1 << 20)
        assert b"[DONE]" not in text
        await raw.close()


# Waiting ---------------------------------------------------------------------------------------------------


async def test_c21_a_waiting_stream_commits_and_stays_alive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_stream, "KEEP_ALIVE_S", 0.4)

    async def play(envelope: RequestEnvelope) -> None:
        await asyncio.sleep(2.2)
        await world.send(envelope, answer("a", "b")[:2])
        await asyncio.sleep(1.2)
        await world.send(envelope, answer("a", "b")[2:], first_seq=2)

    world.play = play
    raw = await Raw.open(world)
    started = time.monotonic()
    await raw.post(STREAM)
    status, _ = await raw.head()
    assert status == 200
    assert time.monotonic() - started < 2
    text = (await raw.reader.readuntil(b"0\r\n\r\n")).decode()
    # Chunked coding: every second line of the parts is a length.
    body = "".join(part.split("\r\n", 1)[1] for part in _chunks(text))
    assert body.count(": keep-alive\n") >= 3
    events = events_of(body)
    assert text_of(events) == "ab"
    assert not {"id:", "retry:", "event:"} & {line[:3] for line in body.split("\n")}
    await raw.close()


def _chunks(text: str) -> list[str]:
    found = []
    while text and not text.startswith("0\r\n"):
        size = int(text.split("\r\n", 1)[0], 16)
        start = text.index("\r\n") + 2
        found.append(f"{size:x}\r\n" + text[start : start + size])
        text = text[start + size + 2 :]
    return found


@pytest.mark.parametrize("fails", [False, True])
async def test_c21_the_openai_sdk_reads_over_keep_alives(
    world: World, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(gateway_stream, "KEEP_ALIVE_S", 0.2)

    async def play(envelope: RequestEnvelope) -> None:
        await asyncio.sleep(1.2)
        contents: list[Content] = [
            ("accepted", None),
            *[("chunk", chunk(t, created=1, model="m")) for t in "ab"],
            ("end", ended()),
        ]
        await world.send(envelope, contents[:2])
        await asyncio.sleep(1.2)
        if fails:
            await world.fail(envelope, ErrorData(code="worker_lost", message="The worker was lost."))
        else:
            await world.send(envelope, contents[2:], first_seq=2)

    world.play = play
    texts = []

    async def read() -> None:
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key=K1, max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            async for part in stream:
                texts.append(part.choices[0].delta.content)

    if fails:
        with pytest.raises(openai.APIError, match="The worker was lost"):
            await read()
        assert texts == ["a"]
    else:
        await read()
        assert texts == ["a", "b"]


async def test_a_failure_after_the_commit_is_an_event(world: World) -> None:
    async def play(envelope: RequestEnvelope) -> None:
        await asyncio.sleep(1.5)
        await world.fail(envelope, ErrorData(code="deadline_exceeded", message="Too late."), attempt=0)

    world.play = play
    response = await world.post(STREAM)
    assert response.status_code == 200
    [event] = events_of(response.text)
    assert event["error"]["code"] == "deadline_exceeded"


async def test_c46_what_the_engine_sends_is_passed_on_untouched(world: World) -> None:
    usage = {"id": "c", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6}}

    async def play(envelope: RequestEnvelope) -> None:
        body = await world.body_of(envelope)
        last: list[Content] = [("chunk", usage)] if body.get("stream_options", {}).get("include_usage") else []
        await world.send(envelope, [("chunk", chunk("a")), *last, ("end", ended())])

    world.play = play
    with_usage = events_of((await world.post(STREAM | {"stream_options": {"include_usage": True}})).text)
    assert with_usage == [chunk("a"), usage, "[DONE]"]
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
        assert events_of((await world.post(STREAM | options)).text) == [chunk("a"), "[DONE]"]


async def test_c33_n_reserves_and_reaches_the_engine(world: World) -> None:
    await world.post(STREAM | {"n": 2, "max_tokens": 3})
    assert (world.admissions[0].choices, world.admissions[0].max_output_tokens) == (2, 3)
    assert (await world.body_of(world.stored[0]))["n"] == 2


# The life of the process -----------------------------------------------------------------------------------


async def test_heartbeats_are_sent_and_a_goodbye(nats_url: str, tmp_path: Path) -> None:
    async with serve(nats_url, tmp_path) as world:
        await until(lambda: len(world.beats) >= 3)
        assert len({beat.stream_owner for beat in world.beats}) == 1
        await world.post(BASE)
        assert world.admissions[0].stream_owner == world.stored[0].stream_owner == world.beats[0].stream_owner
        world.gateway.stop()
        await until(lambda: world.beats[-1].leaving)


async def test_c38_a_shutdown_lets_streams_finish_and_ends_the_rest(nats_url: str, tmp_path: Path) -> None:
    async with serve(nats_url, tmp_path, grace_s=2.0) as world:

        async def play(envelope: RequestEnvelope) -> None:
            await world.send(envelope, answer("a", "b")[:2])
            if envelope.client_request_id == "short":
                await asyncio.sleep(1.0)
                await world.send(envelope, answer("a", "b")[2:], first_seq=2)

        world.play = play
        running = [
            asyncio.create_task(world.post(STREAM, headers={"X-Request-Id": name})) for name in ("short", "long")
        ]
        late = asyncio.create_task(world.post(BASE, headers={"X-Request-Id": "gathered"}))
        await until(lambda: len(world.stored) == 3)

        async def ready() -> bool:
            return await world.status_of("/health/ready") == 200

        await until(ready)
        world.gateway.stop()

        async def unready() -> bool:
            return await world.status_of("/health/ready") == 503

        await until(unready)
        assert (await world.client.get("/health/live")).status_code == 200
        refused = await world.post(BASE)
        assert (refused.status_code, error_of(refused)["code"]) == (503, "shutting_down")
        assert refused.headers["connection"] == "close"
        short, long = await asyncio.gather(*running)
        assert text_of(events_of(short.text)) == "ab"
        assert events_of(long.text)[-1]["error"]["code"] == "shutting_down"
        assert (await late).status_code == 503
        await until(lambda: len(world.cancelled) == 2)
        assert {cancel.reason for cancel in world.cancelled} == {"shutdown"}
