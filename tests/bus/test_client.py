"""The client of internal services against a real server, with a scripted gateway, scheduler and worker."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from contracts import subjects
from contracts.bus import Bus, Incoming
from contracts.client import Client
from contracts.client import stream as stream_module
from contracts.errors import HeadraceError
from contracts.messages.control import CancelAnswer, CancelRequest, StatusAnswer, StreamOwnerHeartbeat
from contracts.messages.frames import EndData, ErrorData, Frame, FrameKind, FramesAnswer, FramesRequest, ReplyMessage
from contracts.messages.request import SubmitAnswer, SubmitRequest
from tests.support.nats_server import NatsServer
from tests.support.polling import until

encode = msgspec.json.encode
decode = msgspec.json.decode

MESSAGES = [{"role": "user", "content": "Hello"}]
USAGE = EndData(outcome="completed", finish_reason="stop", prompt_tokens=5, completion_tokens=3)
TENANT = "search.team"
MODEL = "smol"


def chat_chunk(text: str) -> dict[str, object]:
    return {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}


def make_frames(*texts: str, end: EndData | ErrorData | None = USAGE) -> list[tuple[FrameKind, object]]:
    frames: list[tuple[FrameKind, object]] = [("accepted", None)]
    frames += [("chunk", chat_chunk(text)) for text in texts]
    if end is not None:
        frames.append(("end" if isinstance(end, EndData) else "error", end))
    return frames


class Service:
    """Gateway, scheduler and worker in one. Each submission takes the next of ``script``."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.script: list[Callable[[SubmitRequest, str], Awaitable[SubmitAnswer]]] = []
        self.submitted: list[SubmitRequest] = []
        self.cancelled: list[CancelRequest] = []
        self.beats: list[StreamOwnerHeartbeat] = []
        self.asked: list[FramesRequest] = []
        self.kept: dict[str, list[Frame]] = {}
        self.replies: dict[str, str] = {}
        self.status = StatusAnswer(state="running", attempt=1, worker="w-1")
        self.undurable = 0
        """Cancels answered before one is durable."""

    async def start(self) -> None:
        await self.bus.subscribe(subjects.SUBMITS, self._on_submit, concurrent=True)
        await self.bus.subscribe(subjects.cancels_of(MODEL), self._on_cancel)
        await self.bus.subscribe(subjects.statuses_of(MODEL), self._on_status)
        await self.bus.subscribe(subjects.frames_of("w-1"), self._on_frames)
        await self.bus.subscribe("hb.v1.stream-owner.>", self._on_beat)

    async def _on_submit(self, message: Incoming) -> None:
        assert subjects.tenant_and_model_of_submit(message.subject) == (TENANT, MODEL)
        request = decode(message.data, type=SubmitRequest)
        self.submitted.append(request)
        act = self.script.pop(0)
        message.respond(encode(await act(request, f"r{len(self.submitted)}")))

    async def _on_cancel(self, message: Incoming) -> None:
        assert subjects.tenant_of_last_token(message.subject) == TENANT
        request = decode(message.data, type=CancelRequest)
        self.cancelled.append(request)
        if self.undurable:
            self.undurable -= 1
            message.respond(encode(CancelAnswer(durable=False)))
            return
        message.respond(encode(CancelAnswer(durable=True, outcome="cancelled")))
        kept = self.kept.get(request.request_id)
        if kept and kept[-1].kind not in ("end", "error"):
            await self.send(request.request_id, [("end", EndData(outcome="cancelled", completion_tokens=2))])

    async def _on_status(self, message: Incoming) -> None:
        message.respond(encode(self.status))

    async def _on_frames(self, message: Incoming) -> None:
        request = decode(message.data, type=FramesRequest)
        self.asked.append(request)
        kept = self.kept.get(request.request_id)
        if kept is None:
            message.respond(encode(FramesAnswer(known=False)))
        else:
            page = kept[request.from_seq : request.from_seq + 2]
            more = len(kept) > request.from_seq + 2
            message.respond(encode(FramesAnswer(known=True, frames=page, more=more)))

    def _on_beat(self, message: Incoming) -> None:
        self.beats.append(decode(message.data, type=StreamOwnerHeartbeat))

    async def send(self, request_id: str, content: list[tuple[FrameKind, object]], lose: tuple[int, ...] = ()) -> None:
        """Send the next frames of the request, keep them all, and lose some on the way."""
        subject, _, stream = self.replies[request_id].partition(" ")
        kept = self.kept.setdefault(request_id, [])
        new = []
        for kind, data in content:
            frame = Frame(stream=stream, attempt=1, seq=len(kept), kind=kind)
            if data is not None:
                frame = msgspec.structs.replace(frame, data=msgspec.Raw(encode(data)))
            new.append(frame)
            kept.append(frame)
        frames = [frame for frame in new if frame.seq not in lose]
        await self.bus.publish(subject, encode(ReplyMessage(worker="w-1", frames=frames)))

    def answer(
        self, content: list[tuple[FrameKind, object]], lose: tuple[int, ...] = ()
    ) -> Callable[[SubmitRequest, str], Awaitable[SubmitAnswer]]:
        async def act(request: SubmitRequest, request_id: str) -> SubmitAnswer:
            self.replies[request_id] = f"{request.reply.subject} {request.reply.stream}"
            await self.send(request_id, content, lose)
            return SubmitAnswer(admitted=True, request_id=request_id)

        return act

    def refuse(self, error: ErrorData) -> Callable[[SubmitRequest, str], Awaitable[SubmitAnswer]]:
        async def act(request: SubmitRequest, request_id: str) -> SubmitAnswer:
            return SubmitAnswer(admitted=False, request_id=request_id, error=error)

        return act


@pytest.fixture
async def service(nats_url: str) -> AsyncIterator[Service]:
    bus = await Bus.connect(nats_url, name="fake")
    service = Service(bus)
    await service.start()
    yield service
    await bus.close()


@pytest.fixture
async def client(service: Service, nats_url: str) -> AsyncIterator[Client]:
    async with Client(nats_url, tenant=TENANT) as client:
        yield client


async def test_a_chat_streams_typed_chunks_and_its_usage(service: Service, client: Client) -> None:
    service.script = [service.answer(make_frames("He", "llo", "!"))]
    stream = client.chat(model=MODEL, messages=MESSAGES, temperature=0, deadline_ms=9_000)
    chunks = [chunk async for chunk in stream]
    assert [chunk.text for chunk in chunks] == ["He", "llo", "!"]
    assert decode(chunks[0].raw) == chat_chunk("He")
    assert stream.usage == USAGE
    assert stream.request_id == "r1"
    (request,) = service.submitted
    assert decode(request.body) == {"messages": MESSAGES, "temperature": 0, "stream": True}
    assert request.reply.subject.startswith(subjects.tenant_reply_prefix(TENANT))
    assert request.deadline_ms == pytest.approx(9_000, abs=1_000)
    assert request.stream_owner == client.incarnation
    assert not service.cancelled


async def test_completions_and_whole_answers(service: Service, client: Client) -> None:
    text = {"choices": [{"index": 0, "text": "once"}]}
    whole = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "whole"}}], "usage": {"x": 1}}
    service.script = [
        service.answer([("chunk", text), ("end", USAGE)]),
        service.answer([("chunk", text), ("end", USAGE)]),
        service.answer([("chunk", whole), ("end", USAGE)]),
    ]
    assert [chunk.text async for chunk in client.complete(model=MODEL, prompt="p")] == ["once"]
    assert (await client.complete_once(model=MODEL, prompt="p")).text == "once"
    answer = await client.chat_once(model=MODEL, messages=MESSAGES)
    assert answer.text == "whole"
    assert answer.usage == {"x": 1}
    assert [request.endpoint for request in service.submitted] == ["completions"] * 2 + ["chat/completions"]
    assert [decode(request.body)["stream"] for request in service.submitted] == [True, False, False]


async def test_every_api_has_its_types(service: Service, client: Client) -> None:
    """Bodies as vLLM gives them out, shortened; what has no name is in ``raw``."""
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}},
        {"type": "response.function_call_arguments.delta", "delta": "{"},
        {"type": "response.output_text.delta", "delta": "one"},
        {"type": "response.completed", "response": {"id": "resp_1", "status": "completed"}},
    ]
    response = {
        "id": "resp_1",
        "status": "completed",
        "output": [
            {"type": "reasoning", "summary": []},
            {
                "type": "message",
                "content": [{"type": "output_text", "text": "one"}, {"type": "refusal", "refusal": "r"}],
            },
        ],
        "usage": {"output_tokens": 1},
    }
    blocks: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "msg_1"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "two"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "{"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    message = {
        "content": [{"type": "text", "text": "two"}, {"type": "tool_use", "input": {}}],
        "stop_reason": "tool_use",
    }
    vectors = {"data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1]}], "usage": {"prompt_tokens": 2}}
    scripts: list[list[dict[str, Any]]] = [events, [response], blocks, [message], [vectors]]
    service.script = [service.answer([("chunk", it) for it in script] + [("end", USAGE)]) for script in scripts]
    told = [event async for event in client.respond(model=MODEL, input="q")]
    assert [event.text for event in told] == ["", "", "one", ""]
    assert told[-1].response == events[-1]["response"] and decode(told[1].raw) == events[1]
    whole = await client.respond_once(model=MODEL, input="q")
    assert (whole.text, whole.status, whole.usage) == ("one", "completed", {"output_tokens": 1})
    pieces = [event async for event in client.message(model=MODEL, messages=MESSAGES, max_tokens=5)]
    assert [piece.text for piece in pieces] == ["", "", "two", "", "", ""]
    assert pieces[4].usage == {"output_tokens": 1}
    answer = await client.message_once(model=MODEL, messages=MESSAGES, max_tokens=5)
    assert (answer.text, answer.stop_reason, answer.content[1]["type"]) == ("two", "tool_use", "tool_use")
    embedded = await client.embed(model=MODEL, input=["q"])
    assert [it.embedding for it in embedded.data] == [[0.5, 1.0]]
    endpoints = ["responses"] * 2 + ["messages"] * 2 + ["embeddings"]
    assert [request.endpoint for request in service.submitted] == endpoints
    assert [decode(request.body)["stream"] for request in service.submitted] == [True, False, True, False, False]


async def test_many_streams_share_one_inbox_and_stay_apart(service: Service, client: Client) -> None:
    count = 200

    async def ask(number: int) -> str:
        return "".join([chunk.text async for chunk in client.chat(model=MODEL, messages=MESSAGES, user=str(number))])

    async def act(request: SubmitRequest, request_id: str) -> SubmitAnswer:
        user = decode(request.body)["user"]
        service.replies[request_id] = f"{request.reply.subject} {request.reply.stream}"
        await service.send(request_id, make_frames(*[f"{user}.{index} " for index in range(5)]))
        return SubmitAnswer(admitted=True, request_id=request_id)

    service.script = [act] * count
    answers = await asyncio.gather(*[ask(number) for number in range(count)])
    assert answers == ["".join(f"{number}.{index} " for index in range(5)) for number in range(count)]
    assert len({request.reply.subject for request in service.submitted}) == 1


async def test_lost_frames_are_fetched_in_pages(service: Service, client: Client) -> None:
    texts = [str(number) for number in range(10)]
    service.script = [service.answer(make_frames(*texts), lose=(3, 4, 5, 6, 7))]
    stream = client.chat(model=MODEL, messages=MESSAGES)
    assert [chunk.text async for chunk in stream] == texts
    assert {request.request_id for request in service.asked} == {"r1"}
    assert stream.usage == USAGE


async def test_a_lost_tail_is_found_by_asking_the_scheduler(service: Service, client: Client) -> None:
    service.status = StatusAnswer(state="ended", attempt=1, worker="w-1", outcome="completed", last_seq=3)
    service.script = [service.answer(make_frames("a", "b"), lose=(2, 3))]
    assert [chunk.text async for chunk in client.chat(model=MODEL, messages=MESSAGES)] == ["a", "b"]


async def test_an_error_comes_after_the_chunks_before_it(service: Service, client: Client) -> None:
    error = ErrorData(code="engine_error", message="the engine broke")
    service.script = [service.answer(make_frames("a", "b", end=error))]
    seen: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            seen.append(chunk.text)

    stream = client.chat(model=MODEL, messages=MESSAGES)
    with pytest.raises(HeadraceError, match="the engine broke") as caught:
        await read()
    assert seen == ["a", "b"]
    assert caught.value.code == "engine_error"
    assert caught.value.__notes__ == ["request r1"]
    assert stream.usage is None


async def test_a_refusal_is_tried_again_after_its_pause(service: Service, client: Client) -> None:
    loop = asyncio.get_running_loop()
    busy = ErrorData(code="overloaded", message="busy", retry_after_s=1)
    service.script = [service.refuse(busy), service.answer(make_frames("ok"))]
    began = loop.time()
    assert [chunk.text async for chunk in client.chat(model=MODEL, messages=MESSAGES)] == ["ok"]
    assert loop.time() - began >= 1.0
    assert len(service.submitted) == 2


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (ErrorData(code="rate_limit_exceeded", message="m", retry_after_s=0), 3),
        (ErrorData(code="insufficient_quota", message="m", retry_after_s=86_400), 1),
        (ErrorData(code="context_length_exceeded", message="m", param="messages"), 1),
        (ErrorData(code="overloaded", message="m", retry_after_s=30), 1),
    ],
)
async def test_refusals_are_raised_within_bounds(
    service: Service, client: Client, error: ErrorData, tries: int
) -> None:
    """The last one because the pause is longer than the caller's deadline."""
    service.script = [service.refuse(error)] * 3
    with pytest.raises(HeadraceError) as caught:
        await client.chat_once(model=MODEL, messages=MESSAGES, deadline_ms=20_000)
    assert (caught.value.code, caught.value.param) == (error.code, error.param)
    assert caught.value.retry_after_s == error.retry_after_s
    assert len(service.submitted) == tries


async def test_without_a_gateway_it_is_unavailable(nats_url: str) -> None:
    async with Client(nats_url, tenant=TENANT, retries=0) as client:
        with pytest.raises(HeadraceError) as caught:
            await client.chat_once(model=MODEL, messages=MESSAGES)
    assert caught.value.code == "unavailable"


async def test_what_cannot_be_sent_is_refused_at_once(service: Service, client: Client) -> None:
    with pytest.raises(HeadraceError) as caught:
        await client.chat_once(model="m" * 200, messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(HeadraceError) as caught:
        await client.chat_once(
            model=MODEL, messages=[{"role": "user", "content": "x" * service.bus.session.max_payload}]
        )
    assert caught.value.code == "request_too_large"
    with pytest.raises(TypeError):
        client.chat(model=MODEL, messages=[{"content": object()}])


async def test_leaving_the_loop_cancels_the_generation(service: Service, client: Client) -> None:
    service.undurable = 2
    service.script = [service.answer(make_frames("a", "b", end=None))]
    async for chunk in client.chat(model=MODEL, messages=MESSAGES):
        assert chunk.text == "a"
        break
    await until(lambda: len(service.cancelled) == 3)
    assert {request.request_id for request in service.cancelled} == {"r1"}


async def test_the_end_of_the_block_cancels_though_the_iterator_lives(service: Service, client: Client) -> None:
    service.script = [service.answer(make_frames("a", end=None))]
    async with client.chat(model=MODEL, messages=MESSAGES) as stream:
        iterator = aiter(stream)
        assert (await anext(iterator)).text == "a"
    await until(lambda: service.cancelled)
    with pytest.raises(StopAsyncIteration):
        await anext(iterator)


async def test_a_cancelled_task_cancels_the_generation(service: Service, client: Client) -> None:
    service.script = [service.answer(make_frames("a", end=None))]
    seen = asyncio.Event()

    async def read() -> None:
        async for _ in client.chat(model=MODEL, messages=MESSAGES):
            seen.set()

    reading = asyncio.create_task(read())
    await seen.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await until(lambda: service.cancelled)


async def test_a_task_cancelled_while_it_submits_cancels_what_gets_admitted(service: Service, client: Client) -> None:
    admit = asyncio.Event()

    async def act(request: SubmitRequest, request_id: str) -> SubmitAnswer:
        await admit.wait()
        return SubmitAnswer(admitted=True, request_id=request_id)

    service.script = [act]
    asking = asyncio.create_task(client.chat_once(model=MODEL, messages=MESSAGES))
    await until(lambda: service.submitted)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    admit.set()
    await until(lambda: service.cancelled)
    assert service.cancelled[0].request_id == "r1"


async def test_cancel_returns_when_durable_and_the_stream_ends_with_its_usage(service: Service, client: Client) -> None:
    service.undurable = 1
    service.script = [service.answer(make_frames("a", "b", end=None))]
    stream = client.chat(model=MODEL, messages=MESSAGES)
    seen = []
    async for chunk in stream:
        seen.append(chunk.text)
        if len(seen) == 1:
            await stream.cancel()
            assert len(service.cancelled) == 2
    assert seen == ["a", "b"]
    assert stream.usage == EndData(outcome="cancelled", completion_tokens=2)
    await stream.cancel()
    assert len(service.cancelled) == 2


async def test_a_stream_cancelled_by_another_hand_is_an_error(service: Service, client: Client) -> None:
    service.script = [service.answer(make_frames("a", end=EndData(outcome="cancelled")))]
    with pytest.raises(HeadraceError) as caught:
        async for _ in client.chat(model=MODEL, messages=MESSAGES):
            pass
    assert caught.value.code == "cancelled"


async def test_a_stream_cancelled_before_it_began_asks_for_nothing(service: Service, client: Client) -> None:
    stream = client.chat(model=MODEL, messages=MESSAGES)
    await stream.cancel()
    assert [chunk async for chunk in stream] == []
    with pytest.raises(RuntimeError, match="once"):
        aiter(stream)
    assert not service.submitted


async def test_a_reader_that_is_too_slow_gets_an_error_after_what_was_kept(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("contracts.client.stream.UNREAD_BYTES_MAX", 1_000)
    service.script = [service.answer(make_frames(*["x" * 100] * 20, end=None))]
    seen: list[str] = []

    async def read() -> None:
        async for chunk in client.chat(model=MODEL, messages=MESSAGES):
            seen.append(chunk.text)
            await until(lambda: service.cancelled)

    with pytest.raises(HeadraceError) as caught:
        await read()
    assert caught.value.code == "slow_reader"
    assert 0 < len(seen) < 10
    assert service.cancelled[0].reason == "slow_reader"


async def test_heartbeats_and_a_goodbye(service: Service, nats_url: str) -> None:
    service.script = [service.answer(make_frames("a", end=None))]
    async with Client(nats_url, tenant=TENANT) as client:
        iterator = aiter(client.chat(model=MODEL, messages=MESSAGES))
        await anext(iterator)
        await until(lambda: len(service.beats) >= 3)
        assert not any(beat.leaving for beat in service.beats)
    with pytest.raises(HeadraceError) as caught:
        await anext(iterator)
    assert caught.value.code == "cancelled"
    await until(lambda: service.beats[-1].leaving)
    assert {beat.stream_owner for beat in service.beats} == {
        subjects.tenant_stream_owner(client.tenant, client.incarnation)
    }


async def test_a_restart_of_the_bus_leaves_no_hole(service: Service, client: Client, nats: NatsServer) -> None:
    service.script = [service.answer(make_frames("a", end=None))]
    iterator = aiter(client.chat(model=MODEL, messages=MESSAGES))
    seen = [(await anext(iterator)).text]
    nats.restart()
    await until(lambda: service.bus.session.reconnects)
    beats = len(service.beats)
    await until(lambda: len(service.beats) > beats)  # Client and service are connected again.
    await service.send("r1", make_frames("b", "c", "d")[1:], lose=(2, 3))
    seen += [chunk.text async for chunk in iterator]
    assert seen == ["a", "b", "c", "d"]
    beats = len(service.beats)
    await until(lambda: len(service.beats) > beats)


# A submit whose answer does not come ------------------------------------------------------------------------------


async def test_nothing_runs_after_its_caller_was_told_that_it_failed(
    service: Service, nats: NatsServer, nats_url: str
) -> None:
    async with Client(nats_url, tenant=TENANT, retries=0) as client:
        nats.stop()
        assert client._access is not None
        bus = client._access.bus
        await until(lambda: not bus.connected)
        with pytest.raises(HeadraceError) as caught:
            await client.chat_once(model=MODEL, messages=MESSAGES)
        assert caught.value.code == "unavailable"
        nats.start()
        await until(lambda: bus.connected and service.bus.connected)
        service.script = [service.answer(make_frames("ok"))]
        assert [chunk.text async for chunk in client.chat(model=MODEL, messages=MESSAGES)] == ["ok"]
    assert len(service.submitted) == 1


async def never(request: SubmitRequest, request_id: str) -> SubmitAnswer:
    raise LookupError("the answer is lost")


async def test_a_try_without_an_answer_is_joined_by_the_next(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first was admitted and ran; what it sent to the first name is read under the second, from the start."""
    monkeypatch.setattr(stream_module, "SUBMIT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(stream_module, "RETRY_WAIT_S", 0)

    async def runs_unheard(request: SubmitRequest, request_id: str) -> SubmitAnswer:
        await service.answer(make_frames("a", "b", "c"))(request, request_id)
        return await never(request, request_id)

    async def joins(request: SubmitRequest, request_id: str) -> SubmitAnswer:
        return SubmitAnswer(admitted=True, request_id="r1", joined=True)

    service.script = [runs_unheard, joins]
    stream = client.chat(model=MODEL, messages=MESSAGES)
    assert [chunk.text async for chunk in stream] == ["a", "b", "c"]
    first, second = service.submitted
    assert first.idempotency_key == second.idempotency_key != ""
    assert first.reply.stream != second.reply.stream
    assert stream.request_id == "r1" and stream.usage == USAGE
    assert not service.cancelled


async def test_frames_of_a_refused_try_are_not_read_as_those_of_the_next(service: Service, client: Client) -> None:
    """Its gateway could not make sure that it was stored, and it ran for a while."""
    unsure = ErrorData(code="unavailable", message="The request could not be stored.", retry_after_s=0)

    async def runs_and_is_refused(request: SubmitRequest, request_id: str) -> SubmitAnswer:
        await service.answer(make_frames("of the first", end=None))(request, request_id)
        return SubmitAnswer(admitted=False, request_id=request_id, status=503, error=unsure)

    async def runs(request: SubmitRequest, request_id: str) -> SubmitAnswer:
        await service.send("r1", [("end", EndData(outcome="cancelled"))])
        return await service.answer(make_frames("of the second"))(request, request_id)

    service.script = [runs_and_is_refused, runs]
    assert [chunk.text async for chunk in client.chat(model=MODEL, messages=MESSAGES)] == ["of the second"]


async def test_who_gives_up_without_an_answer_cancels_by_its_key(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "SUBMIT_TIMEOUT_S", 0.2)
    monkeypatch.setattr(stream_module, "RETRY_WAIT_S", 0)
    service.script = [never] * 3
    with pytest.raises(HeadraceError) as caught:
        await client.chat_once(model=MODEL, messages=MESSAGES)
    assert caught.value.code == "unavailable"
    await until(lambda: service.cancelled)
    (key,) = {request.idempotency_key for request in service.submitted}
    (cancel,) = service.cancelled
    assert (cancel.request_id, cancel.idempotency_key, cancel.reader) == ("", key, service.submitted[-1].reply.stream)


async def test_who_leaves_before_an_answer_cancels_by_its_key(
    service: Service, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "SUBMIT_TIMEOUT_S", 0.3)
    service.script = [never]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.chat_once(model=MODEL, messages=MESSAGES)
    await until(lambda: service.cancelled)
    assert service.cancelled[0].idempotency_key == service.submitted[0].idempotency_key
    assert len(service.submitted) == 1, "and does not try again"


async def test_each_call_has_a_key_of_its_own_unless_it_is_given_one(service: Service, client: Client) -> None:
    service.script = [service.answer(make_frames("ok"))] * 3
    for key in ("", "", "order-7"):
        async for _ in client.chat(model=MODEL, messages=MESSAGES, idempotency_key=key):
            pass
    keys = [request.idempotency_key for request in service.submitted]
    assert len(set(keys)) == 3 and keys[2] == "order-7"
