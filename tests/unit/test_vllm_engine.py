"""What stands between vLLM and the worker and needs no vLLM: command line, bodies, failures, ASGI exchanges."""

import asyncio
import contextvars
import subprocess
import sys
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from contracts.messages.base import Endpoint
from contracts.messages.records import Manifest
from worker.config import WorkerConfig
from worker.engines import table
from worker.engines.base import Counts, EngineFailure, Job
from worker.engines.vllm.arguments import engine_arguments
from worker.engines.vllm.asgi import Application, AsgiCall
from worker.engines.vllm.engine import VllmEngine
from worker.engines.vllm.translation import (
    STREAM_FORMS,
    constraint_refusal,
    failure_of,
    vllm_request,
    with_own_id,
    with_usage,
)

CPU = WorkerConfig(model="small", vllm_slots=8)
SMALL = Manifest(
    name="small", version="v1", engine="vllm", context=4096, default_output_tokens=16, path="/models/small"
)


def test_importing_the_engine_does_not_import_vllm() -> None:
    code = "import sys, worker.engines.table; sys.exit('vllm' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_kind_of_engine_has_its_row() -> None:
    kinds = get_args(get_type_hints(Manifest)["engine"])
    assert set(table.ENGINES) == set(kinds) == {"simulated", "vllm"}
    for kind in kinds:
        manifest = Manifest(name="m", version="v1", engine=kind, context=100, default_output_tokens=16)
        engine = table.build(WorkerConfig(model="m", sim_slots=3, vllm_slots=5), manifest)
        assert engine.slots == {"simulated": 3, "vllm": 5}[kind]


def test_a_cpu_gets_the_measured_defaults() -> None:
    line = engine_arguments(CPU, SMALL)
    assert {"--model=/models/small", "--served-model-name=small", "--max-num-seqs=8"} <= set(line)
    assert {"--enforce-eager", "--block-size=32", "--max-num-batched-tokens=512"} <= set(line)
    assert f"--kv-cache-memory-bytes={256 * 2**20}" in line
    assert "--tool-call-parser=hermes" in line


def test_a_gpu_is_a_matter_of_configuration() -> None:
    config = msgspec.structs.replace(CPU, vllm_gpu_memory_utilization=0.9, vllm_engine_args={"tensor_parallel_size": 2})
    line = engine_arguments(config, SMALL)
    assert {"--gpu-memory-utilization=0.9", "--max-model-len=4096", "--tensor-parallel-size=2"} <= set(line)
    cpu_only = ("--enforce-eager", "--block-size", "--kv-cache", "--worker-extension")
    assert not any(it.startswith(cpu_only) for it in line)


def test_extra_arguments_win_and_null_takes_one_out() -> None:
    extra = {"enforce_eager": False, "block_size": None, "hf_overrides": {"a": [1]}}
    line = engine_arguments(msgspec.structs.replace(CPU, vllm_engine_args=extra), SMALL)
    assert {"--no-enforce-eager", '--hf-overrides={"a":[1]}'} <= set(line)
    assert not any("block-size" in argument for argument in line)


def test_nothing_is_fetched_for_a_caller_unless_an_operator_names_domains() -> None:
    line = engine_arguments(CPU, SMALL)
    assert line[line.index("--allowed-media-domains") + 1] == "none.invalid"
    assert not any(it.startswith("--allowed-local-media-path") for it in line)
    named = msgspec.structs.replace(CPU, vllm_engine_args={"allowed_media_domains": ["a.example", "b.example"]})
    line = engine_arguments(named, SMALL)
    assert line[line.index("--allowed-media-domains") + 1 :][:2] == ["a.example", "b.example"]


def job(body: bytes, *, stream: bool = True, salt: str = "s") -> Job:
    return Job(request_id="r", attempt=1, endpoint="chat/completions", body=body, stream=stream, cache_salt=salt)


def test_the_body_gets_our_fields_and_keeps_the_callers_text() -> None:
    body = vllm_request(
        job(b'{"model": "x", "stream": true, "temperature": 1.50, "foo": {"a": [1e2]}}', stream=False), "small"
    ).body
    assert msgspec.json.decode(body) == {
        "model": "small",
        "stream": False,
        "cache_salt": "s",
        "temperature": 1.5,
        "foo": {"a": [100]},
    }
    assert b'"temperature":1.50' in body
    assert b"1e2" in body


def test_d25_usage_on_chunks_is_ours_to_tell() -> None:
    options = b'{"stream_options": {"include_usage": true, "continuous_usage_stats": true}}'
    request = vllm_request(job(options), "small")
    assert request.usage_on_chunks
    assert msgspec.json.decode(request.body)["stream_options"] == {"include_usage": True}
    counts = Counts(prompt_tokens=5, completion_tokens=3, cached_tokens=4)
    chunk = msgspec.json.decode(with_usage(b'{"choices":[{"text":"a \\"choices\\":[]"}]}', counts))
    assert chunk["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    last = b'{"choices":[],"usage":{"prompt_tokens":5}}'
    assert with_usage(last, counts) == last


def test_d18_an_answer_by_anthropics_api_has_an_id_of_it() -> None:
    asked = msgspec.structs.replace(job(b"{}"), endpoint="messages")
    assert with_own_id(b'{"id":"chatcmpl-r","type":"message"}', asked) == b'{"id":"msg_r","type":"message"}'
    assert with_own_id(b'{"id":"chatcmpl-r"}', job(b"{}")) == b'{"id":"chatcmpl-r"}'


def test_no_salt_and_a_null_simulate_are_no_fields() -> None:
    body = vllm_request(job(b'{"simulate": null}', salt=""), "small").body
    assert msgspec.json.decode(body) == {"model": "small", "stream": True}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"simulate": {}}', "simulate"),
        (b"[]", None),
        (b"{", None),
        (b'{"chat_template_kwargs": {"tokenize": true, "padding": "max_length"}}', "chat_template_kwargs"),
        (b'{"chat_template_kwargs": {"x": [[[[1]]]]}}', "chat_template_kwargs"),
        (b'{"chat_template_kwargs": {"x": "%s"}}' % (b"a" * 9000), "chat_template_kwargs"),
        (b'{"chat_template_kwargs": [1]}', "chat_template_kwargs"),
    ],
)
def test_a_body_that_vllm_must_not_see_is_refused(body: bytes, param: str | None) -> None:
    with pytest.raises(EngineFailure) as refusal:
        vllm_request(job(body), "small")
    assert (refusal.value.code, refusal.value.status, refusal.value.param) == ("invalid_request", 400, param)


@pytest.mark.parametrize(
    ("error", "status", "code", "retryable"),
    [
        ({"message": "bad", "code": 400, "param": "n"}, 400, "invalid_request", False),
        ({"message": "bad", "code": 422}, 0, "invalid_request", False),
        ({"message": "This model's maximum context length is 9 tokens."}, 400, "context_length_exceeded", False),
        ({"message": "max_tokens=9 cannot be greater than max_model_len=8"}, 400, "context_length_exceeded", False),
        ({"message": "queue is full", "code": 503}, 503, "engine_error", True),
        ({"message": "Internal server error", "code": 500}, 0, "engine_error", True),
        ({"message": "no such thing", "code": 501}, 501, "engine_error", False),
        ({"message": "odd", "code": "odd"}, 0, "engine_error", True),
    ],
)
def test_vllms_errors_become_failures(error: dict[str, Any], status: int, code: str, retryable: bool) -> None:
    failure = failure_of(msgspec.json.encode({"error": error}), status, "id")
    assert (failure.code, failure.retryable, failure.engine_death) == (code, retryable, False)
    assert failure.param == error.get("param")


CANARY = "CANARY7F3A"
VLLMS_WORDS = [
    f"1 validation error:\n  {{'type': 'list_type', 'loc': 'body.messages', 'msg': 'no list', 'input': '{CANARY}'}}",
    f"Regex compilation timed out after 5s. Pattern: {CANARY}",
    f"Failed to transform regex into a grammar: unexpected ( in {CANARY}",
    f"Choice '{CANARY}' cannot be an empty list",
    f"[Errno 2] No such file or directory: '/models/{CANARY}/tokenizer.json'",
    f"Cannot connect to tcp://10.0.0.7:5555 while serving {CANARY}",
    f"The model `{CANARY}` does not exist.",
    f"This model's maximum context length is 4096 tokens. However, {CANARY}",
]


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503, 0])
@pytest.mark.parametrize("words", VLLMS_WORDS)
def test_a_failure_repeats_neither_what_the_caller_sent_nor_paths_nor_addresses(words: str, status: int) -> None:
    for param in ("body.messages", f"tools.0.{CANARY}", CANARY, None):
        failure = failure_of(msgspec.json.encode({"error": {"message": words, "param": param}}), status, "id-7")
        told = f"{failure.message} {failure.param}"
        assert CANARY not in told and "/models" not in told and "10.0.0.7" not in told
        assert "id-7" in failure.message or "list_type" in failure.message or "4096" in failure.message
        assert failure.param in ("messages", "tools", None)


def test_a_constraint_that_is_refused_is_named_and_not_repeated() -> None:
    for field in ("structured_outputs", "response_format", "text", "output_config", "tools"):
        body = msgspec.json.encode({"model": "m", field: CANARY, "messages": [CANARY]})
        for outcome in ("invalid", "too_complex"):
            failure = constraint_refusal(job(body), "structural_tag", outcome)
            assert (failure.code, failure.status, failure.param, failure.retryable) == (
                "invalid_request",
                400,
                field,
                False,
            )
            assert CANARY not in failure.message and field in failure.message


async def test_an_engine_that_was_not_started_fails() -> None:
    engine = VllmEngine(CPU, SMALL)
    with pytest.raises(EngineFailure):
        await engine.generate(job(b"{}"), Counts(), lambda chunk: None)
    with pytest.raises(EngineFailure) as failed:
        await engine.check()
    assert failed.value.engine_death
    assert engine.stats().running == 0
    await engine.close()


def exchange(application: Application) -> AsgiCall:
    return AsgiCall(
        application, "/v1/x", b'{"a": 1}', headers={"x-request-id": "r"}, context=contextvars.copy_context()
    )


async def _start(send: Any, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})


async def test_events_are_cut_at_blank_lines_wherever_pieces_end() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        assert (scope["path"], scope["method"]) == ("/v1/x", "POST")
        assert (b"x-request-id", b"r") in scope["headers"]
        assert (await receive())["body"] == b'{"a": 1}'
        await _start(send)
        for piece in (
            b"data: on",
            b"e\n\ndata: two\n\n: comment\n\nda",
            b"ta: [DONE]\n\n",
            b"event: stop\nda",
            b"ta: {}\n\n",
        ):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    one = exchange(application)
    assert await one.status() == 200
    events: list[tuple[bytes, bytes]] = []
    await one.events(lambda name, data: events.append((name, data)))
    assert events == [(b"", b"one"), (b"", b"two"), (b"", b"[DONE]"), (b"stop", b"{}")]
    await one.close()


# Streams of the four APIs, from an application that stands in for vLLM's ------------------------------------

DONE = b"data: [DONE]\n\n"
STREAMS: dict[Endpoint, bytes] = {
    "chat/completions": b'data: {"choices":[]}\n\n: comment\n\ndata: {"choices":[],"usage":{}}\n\n' + DONE,
    "completions": b'data: {"choices":[{"text":"a"}]}\n\n' + DONE,
    "responses": b'event: response.created\ndata: {"n":1}\n\nevent: response.completed\ndata: {"n":2}\n\n',
    "messages": b'event: message_start\ndata: {"n":1}\n\nevent: ping\ndata: {}\n\nevent: message_stop\ndata: {}\n\n',
}


class Record:
    failure: EngineFailure | None = None

    def __init__(self, job: Job, counts: Counts) -> None:
        self.job = job
        self.counts = counts

    def count_cut_reasoning(self) -> None:
        self.counts.reasoning_tokens = 1


class Parts:
    """What VllmEngine needs of vLLM; the application sends ``sent``. One token counts before it does."""

    kv_tokens, context, dead = 1000, 100, False

    def __init__(self, *sent: dict[str, Any]) -> None:
        self.sent = sent

    async def application(self, _scope: Any, receive: Any, send: Any) -> None:
        await receive()
        for message in self.sent:
            await send(message)

    def record(self, job: Job, counts: Counts, *, only_scores: bool) -> tuple[contextvars.Context, Record]:
        counts.completion_tokens += 1
        return contextvars.copy_context(), Record(job, counts)

    async def open_application(self) -> None:
        pass

    async def close_application(self) -> None:
        pass

    def shut_down(self) -> None:
        pass


def answer(body: bytes, *, kind: str = "http.response.body") -> tuple[dict[str, Any], ...]:
    start = {"type": "http.response.start", "status": 200, "headers": []}
    return start, {"type": kind, "body": body, "more_body": True}, {"type": "http.response.body", "body": b""}


async def chunks_of(endpoint: Endpoint, *sent: dict[str, Any], stream: bool = True) -> list[bytes]:
    parts = Parts(*answer(STREAMS["completions"]))  # of the warm-up
    engine = VllmEngine(CPU, SMALL, start_vllm=lambda *_: parts)  # type: ignore[arg-type]
    await engine.start()
    parts.sent = sent
    asked = Job(request_id="r", attempt=1, endpoint=endpoint, body=b"{}", stream=stream, cache_salt="s")
    try:
        chunks: list[bytes] = []
        await engine.generate(asked, Counts(), chunks.append)
        return chunks
    finally:
        await engine.close()


async def test_every_api_that_streams_has_a_form_and_passes_on_its_chunks() -> None:
    assert set(STREAMS) == set(STREAM_FORMS) == set(get_args(Endpoint)) - {"embeddings"}
    assert await chunks_of("chat/completions", *answer(STREAMS["chat/completions"])) == [
        b'{"choices":[]}',
        b'{"choices":[],"usage":{}}',
    ]
    assert await chunks_of("completions", *answer(STREAMS["completions"])) == [b'{"choices":[{"text":"a"}]}']
    assert await chunks_of("responses", *answer(STREAMS["responses"])) == [b'{"n":1}', b'{"n":2}']
    assert await chunks_of("messages", *answer(STREAMS["messages"])) == [b'{"n":1}', b"{}", b"{}"]


NAMED, UNNAMED = ("responses", "messages"), ("chat/completions", "completions")


@pytest.mark.parametrize(
    ("planted", "said", "endpoints"),
    [
        (b"event: unknown\ndata: {}\n\n", "an event named 'unknown'", (*NAMED, *UNNAMED)),
        (b"event: response.created\ndata: {}\n\n", "an event named 'response.created'", ("messages", *UNNAMED)),
        (b"event: message_start\ndata: {}\n\n", "an event named 'message_start'", ("responses", *UNNAMED)),
        (b'data: {"choices":[]}\n\n', "an event named ''", NAMED),
        (b"data: [DONE]\n\n", "an event named ''", NAMED),
        (b"data: [1]\n\n", "no JSON object", UNNAMED),
        (b"data: secret\n\n", "no JSON object", UNNAMED),
        (b"event: ping\ndata: secret\n\n", "no JSON object", ("messages",)),
        (b"data: {\ndata: }\n\n", "an event with a line", (*NAMED, *UNNAMED)),
        (b"data:{}\n\n", "an event with a line", (*NAMED, *UNNAMED)),
        (b"id: 1\ndata: {}\n\n", "an event with a line", (*NAMED, *UNNAMED)),
        (b"secret\n\n", "an event with a line", (*NAMED, *UNNAMED)),
        (b"event: ping\n\n", "an event named 'ping' without data", (*NAMED, *UNNAMED)),
    ],
)
async def test_a_chunk_of_an_unknown_form_fails_the_attempt(
    planted: bytes, said: str, endpoints: tuple[Endpoint, ...]
) -> None:
    """It neither vanishes nor is passed on, and another worker would fare no better."""
    for endpoint in endpoints:
        with pytest.raises(EngineFailure) as failed:
            await chunks_of(endpoint, *answer(planted + STREAMS[endpoint]))
        failure = failed.value
        assert said in failure.message and "vLLM sent" in failure.message, endpoint
        assert (failure.code, failure.retryable) == ("engine_error", False)
        assert "secret" not in failure.message


@pytest.mark.parametrize("endpoint", STREAMS)
async def test_a_body_that_ends_inside_an_event_and_an_unknown_message_fail(endpoint: Endpoint) -> None:
    for sent, said in (
        (answer(STREAMS[endpoint] + b"data: {"), "ends inside an event"),
        (answer(STREAMS[endpoint].replace(b"\n", b"\r\n")), "ends inside an event"),
        (answer(b"", kind="http.response.trailers"), "'http.response.trailers'"),
        (({"type": "http.response.pathsend", "path": "/x"},), "'http.response.pathsend'"),
    ):
        with pytest.raises(EngineFailure) as failed:
            await chunks_of(endpoint, *sent)
        assert said in failed.value.message


@pytest.mark.parametrize("endpoint", [*STREAMS, "embeddings"])
async def test_a_whole_answer_must_be_an_object(endpoint: Endpoint) -> None:
    assert await chunks_of(endpoint, *answer(b'{"a":1}'), stream=False) == [b'{"a":1}']
    for body in (b"", b"[]", b"data: {}\n\n"):
        with pytest.raises(EngineFailure) as failed:
            await chunks_of(endpoint, *answer(body), stream=False)
        assert "an answer that is no JSON object" in failed.value.message


@pytest.mark.parametrize("endpoint", STREAMS)
async def test_a_stream_without_its_last_event_was_cut(endpoint: Endpoint) -> None:
    cut = STREAMS[endpoint].rstrip(b"\n").rpartition(b"\n\n")[0] + b"\n\n"
    with pytest.raises(EngineFailure) as failed:
        await chunks_of(endpoint, *answer(cut))
    assert failed.value.retryable and "was cut" in failed.value.message


async def test_closing_tells_the_application_that_its_caller_is_gone() -> None:
    ended = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await _start(send)
        assert (await receive())["type"] == "http.disconnect"
        ended.set()

    one = exchange(application)
    await one.status()
    await one.close()
    assert ended.is_set()


async def test_an_application_that_does_not_heed_its_caller_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.vllm.asgi.CLOSE_TIMEOUT_S", 0.01)
    cancelled = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    one = exchange(application)
    await asyncio.sleep(0)
    await one.close()
    assert cancelled.is_set()


async def test_a_response_that_breaks_off_raises() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await _start(send)
        raise KeyError("x")

    async def short(scope: Any, receive: Any, send: Any) -> None:
        await _start(send)

    for application, kind in ((broken, KeyError), (short, EOFError)):
        one = exchange(application)
        await one.status()
        with pytest.raises(kind):
            await one.body()
        await one.close()


async def test_a_failed_exchange_raises_after_what_was_sent() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        await _start(send, 206)
        await asyncio.Event().wait()

    one = exchange(application)
    await asyncio.sleep(0)
    one.fail(EngineFailure("engine_error", "gone"))
    assert await one.status() == 206
    with pytest.raises(EngineFailure):
        await one.body()
    closing = asyncio.create_task(one.close())
    await asyncio.sleep(0)
    one._task.cancel()
    await closing
