"""A worker with the simulated engine on a real NATS server: what the scheduler and a gateway see of it."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from functools import partial, reduce
from pathlib import Path

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from contracts import ids, subjects, topology
from contracts.bus import Bus
from contracts.messages.attempts import AttemptEvent
from contracts.messages.base import NOTHING, Epoch
from contracts.messages.control import Announce, Evict
from contracts.messages.frames import EndData, ErrorData
from contracts.messages.records import Manifest
from contracts.service import telemetry
from contracts.simulated import measured, simulated_prompts
from tests.support import failure_table, polling
from tests.support.nats_server import NatsServer, free_port
from tests.support.polling import until
from tests.support.worker_harness import MANIFEST, MODEL, WAIT_S, Harness, texts, words
from worker.config import WorkerConfig
from worker.engines import supervisor, table
from worker.engines.base import Engine, EngineFailure
from worker.engines.simulated.engine import SimulatedEngine
from worker.service import Worker


@pytest.fixture
async def harness(nats_url: str) -> AsyncIterator[Harness]:
    bus = await Bus.connect(nats_url, name="test")
    harness = Harness(bus, nats_url)
    await harness.open()
    yield harness
    await harness.close()
    await bus.close()


# The usual path --------------------------------------------------------------------------------------------


async def test_a_stream_is_accepted_generated_ended_and_acknowledged(harness: Harness) -> None:
    await harness.start()
    request_id = await harness.send(simulate={"tokens": words(5)})
    frames = await harness.closed(request_id)
    assert frames[0].kind == "accepted"
    assert {frame.kind for frame in frames[1:-1]} == {"chunk"}
    assert texts(frames) == words(5)
    assert all(message.worker == harness.worker for message in harness.messages)
    event = await harness.event(request_id)
    assert (event.outcome, event.reporter, event.worker) == ("completed", "worker", harness.worker)
    assert (event.tenant, event.key_id, event.model, event.version) == ("ten.ant", "k1", MODEL, "v1")
    assert (event.prompt_tokens, event.completion_tokens, event.finish_reason) == (7, 5, "stop")
    assert event.billable and event.last_seq == frames[-1].seq
    assert 0 < event.dispatched_at_ms <= event.first_token_at_ms <= event.ended_at_ms
    end = msgspec.json.decode(frames[-1].data, type=EndData)
    assert (end.outcome, end.completion_tokens, end.finish_reason) == ("completed", 5, "stop")
    await harness.work_done()


async def test_a_whole_answer_is_one_chunk(harness: Harness) -> None:
    await harness.start()
    request_id = await harness.send(stream=False, simulate={"tokens": words(3)})
    frames = await harness.closed(request_id)
    assert [frame.kind for frame in frames] == ["accepted", "chunk", "end"]
    answer = msgspec.json.decode(frames[1].data)
    assert answer["choices"][0]["message"]["content"] == "".join(words(3))


async def test_a_body_that_travels_by_reference_and_an_answer_in_parts(harness: Harness) -> None:
    await harness.start()
    token = 'é"' * 1_200_000
    item = harness.item(harness.worker, stream=False, simulate={"tokens": [token]})
    body, request = bytes(item.request.body), item.request
    subject = subjects.body(request.model, request.tenant, request.request_id)
    digest = await harness.bus.objects.put(topology.BODIES, subject, body)
    request = msgspec.structs.replace(request, body=NOTHING, body_bytes=len(body), body_digest=digest)
    item = msgspec.structs.replace(item, request=request)
    frames = await harness.closed(await harness.dispatch(item))
    assert [frame.kind for frame in frames][-3:] == ["part", "chunk", "end"]
    whole = "".join(msgspec.json.decode(frame.data, type=str) for frame in frames[1:-1])
    assert msgspec.json.decode(whole)["choices"][0]["message"]["content"] == token


async def test_a_body_that_is_gone_fails_for_good(harness: Harness) -> None:
    await harness.start()
    frames = await harness.closed(await harness.send(body_bytes=70_000))
    assert msgspec.json.decode(frames[-1].data, type=ErrorData).code == "internal_error"


async def test_no_more_runs_than_there_are_slots(harness: Harness) -> None:
    await harness.start(sim_slots=2)
    sent = [await harness.send(max_tokens=10) for _ in range(7)]
    for request_id in sent:
        await harness.closed(request_id)
    assert max(len(beat.in_flight) for beat in harness.beats) <= 2
    assert max(beat.running for beat in harness.beats) <= 2
    await harness.work_done()


async def test_what_does_not_fit_the_kv_cache_waits_held(harness: Harness) -> None:
    await harness.start(sim_kv_tokens=200)
    first = await harness.send(max_tokens=150)
    await harness.tokens(first, 1)
    second = await harness.send(max_tokens=100)
    await until(lambda: {p.request_id for p in harness.beats[-1].in_flight} == {first, second})
    assert harness.beats[-1].waiting == 1
    assert harness.frames(second) == []
    assert (await harness.closed(first))[-1].kind == "end"
    assert (await harness.closed(second))[-1].kind == "end"


async def test_many_prompts_run_beside_others_as_their_real_size_allows(harness: Harness) -> None:
    """A hundred prompts of 500 tokens reserve 51,600 tokens, not a hundred times as many."""
    await harness.start(sim_slots=256, sim_kv_tokens=52_000)
    script = {"ttft_ms": 1, "itl_ms": 200}
    body = {"prompt": ["one two " * 250] * 100, "max_tokens": 16, "stream": False, "simulate": script}
    large = await harness.send(
        endpoint="completions",
        stream=False,
        prompt_tokens=50_000,
        max_output_tokens=16,
        choices=100,
        body=msgspec.Raw(msgspec.json.encode(body)),
    )
    await until(lambda: harness.beats[-1].running == 100)
    small = await harness.send(max_tokens=10)
    await harness.closed(small)
    assert [frame.kind for frame in harness.frames(large)] == ["accepted"], "the small one ran beside it"
    wide = await harness.send(prompt_tokens=300, max_tokens=101)
    await until(lambda: harness.beats[-1].waiting == 1)
    await harness.closed(large)
    await harness.event(wide)  # Its prompt has other tokens than were admitted, so it is given back.
    assert [(await harness.event(it)).reserved_tokens for it in (large, small)] == [51_600, 17]


async def test_heartbeats_tell_progress_and_the_end_at_once(harness: Harness) -> None:
    await harness.start()
    request_id = await harness.send(max_tokens=300)
    await until(lambda: any(p.completion_tokens for p in harness.beats[-1].in_flight), "no progress is told")
    beat = harness.beats[-1]
    assert (beat.model, beat.version, beat.slots, beat.running) == (MODEL, "v1", 4, 1)
    assert beat.in_flight[0].prompt_tokens == 7
    assert await harness.cancel(request_id) == "ended"
    await until(lambda: not harness.beats[-1].in_flight)


# Cancel ----------------------------------------------------------------------------------------------------


async def test_a_cancel_stops_the_generation_and_is_answered_when_the_end_is_stored(harness: Harness) -> None:
    await harness.start()
    request_id = await harness.send(max_tokens=5000)
    await harness.tokens(request_id, 3)
    assert await harness.cancel(request_id) == "ended"
    event = await harness.event(request_id)
    assert (event.outcome, event.billable) == ("cancelled", True)
    assert 3 <= event.completion_tokens < 5000
    frames = await harness.closed(request_id)
    end = msgspec.json.decode(frames[-1].data, type=EndData)
    assert (end.outcome, end.completion_tokens) == ("cancelled", event.completion_tokens)
    assert event.last_seq == frames[-1].seq
    await harness.work_done()
    assert await harness.cancel(request_id) == "ended"
    await until(lambda: harness.beats[-1].kv_tokens_used == 0, "the KV cache is not freed")


async def test_a_cancel_that_overtakes_its_work_holds(harness: Harness) -> None:
    await harness.start()
    item = harness.item(harness.worker)
    request_id = item.request.request_id
    assert await harness.cancel(request_id) == "unknown"
    await harness.dispatch(item)
    await harness.closed(await harness.send(max_tokens=1))  # What came first has been looked at.
    await harness.work_done(left=1)
    assert harness.frames(request_id) == []
    assert await harness.no_event(request_id)


async def test_a_cancel_between_pull_and_submission(harness: Harness) -> None:
    await harness.start()
    request_id = await harness.send(simulate={"submit_delay_ms": 60_000})
    await until(lambda: harness.beats[-1].in_flight)
    assert harness.beats[-1].running == 0
    assert await harness.cancel(request_id) == "ended"
    event = await harness.event(request_id)
    assert (event.outcome, event.completion_tokens, event.billable) == ("cancelled", 0, False)
    assert [frame.kind for frame in await harness.closed(request_id)] == ["accepted", "end"]


# Once ------------------------------------------------------------------------------------------------------


async def test_work_that_is_stored_twice_runs_once(harness: Harness) -> None:
    await harness.start()
    item = harness.item(harness.worker, max_tokens=30)
    request_id = await harness.dispatch(item, msg_id="a")
    await harness.dispatch(item, msg_id="b")
    await harness.closed(request_id)
    await harness.dispatch(item, msg_id="c")
    await harness.work_done()
    assert len(texts(harness.frames(request_id))) == 30
    assert harness.beats[-1].decode_tokens_total == 30


async def test_another_event_that_was_first_silences_the_worker(harness: Harness) -> None:
    await harness.start()
    request_id = await harness.send(max_tokens=100)
    await harness.tokens(request_id, 1)
    event = AttemptEvent(
        request_id=request_id,
        attempt=1,
        tenant="ten.ant",
        key_id="k1",
        model=MODEL,
        version="v1",
        endpoint="chat/completions",
        priority="interactive",
        outcome="lost",
        reporter="scheduler",
    )
    await harness.bus.jetstream.store(
        subjects.attempt(MODEL, request_id, 1), msgspec.json.encode(event), msg_id="s", expect_last=0
    )
    await until(lambda: not harness.beats[-1].in_flight)
    await harness.work_done(left=1)
    assert harness.frames(request_id)[-1].kind == "chunk"
    assert (await harness.event(request_id)).outcome == "lost"


async def test_a_lower_epoch_gets_nothing_done(harness: Harness) -> None:
    await harness.start()
    assert (await harness.order(harness.worker, Announce(epoch=Epoch(1, 9)))).status == "ok"
    await until(lambda: harness.beats[-1].epoch == Epoch(1, 9))
    request_id = await harness.send(epoch=Epoch(1, 8))
    await harness.closed(await harness.send(epoch=Epoch(1, 9), max_tokens=1))
    await harness.work_done(left=1)
    assert await harness.no_event(request_id)
    assert harness.frames(request_id) == []
    assert await harness.cancel(request_id, epoch=Epoch(1, 8)) == "stale"
    assert (await harness.order(harness.worker, Evict(epoch=Epoch(1, 8)))).status == "stale"


async def test_another_tokenizer_is_refused_retryably(harness: Harness) -> None:
    await harness.start()
    event = await harness.event(await harness.send(tokenizer_fingerprint="theirs"))
    assert (event.outcome, event.retryable, event.completion_tokens) == ("failed", True, 0)
    assert "tokenizer" in event.error_message
    await until(lambda: metric("tokenizer_mismatches_total") > 0)
    await until(lambda: not harness.beats[-1].in_flight)
    await harness.work_done(left=1)


async def test_malformed_work_is_cleared_away(harness: Harness) -> None:
    await harness.start()
    await harness.bus.jetstream.store(subjects.work(MODEL, "v1", harness.worker), b"{", msg_id="x")
    await harness.work_done()
    await harness.closed(await harness.send(max_tokens=1))


# Failures --------------------------------------------------------------------------------------------------


async def test_a_retryable_failure_sends_no_frame_and_leaves_the_word_to_the_scheduler(harness: Harness) -> None:
    await harness.start()
    request_id = await harness.send(simulate={"fail_after": 2})
    event = await harness.event(request_id)
    assert (event.outcome, event.retryable, event.billable) == ("failed", True, False)
    assert event.completion_tokens == 2
    await until(lambda: not harness.beats[-1].in_flight)
    await harness.work_done(left=1)
    frames = harness.frames(request_id)
    assert {frame.kind for frame in frames} == {"accepted", "chunk"}
    assert frames[-1].seq == event.last_seq


async def test_a_request_that_the_engine_refuses_ends_with_its_error(harness: Harness) -> None:
    await harness.start()
    frames = await harness.closed(await harness.send(simulate={"nonsense": 1}))
    error = msgspec.json.decode(frames[-1].data, type=ErrorData)
    assert error.code == "invalid_request"


class Mortal(SimulatedEngine):
    """A simulated engine whose health check fails on demand."""

    dead = False

    async def check(self) -> None:
        if self.dead:
            raise EngineFailure("engine_error", "dead", retryable=True, engine_death=True)


async def test_a_dead_engine_is_rebuilt_and_its_attempts_are_returned(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "CHECK_S", 0.05)
    engines: list[Mortal] = []

    def build(manifest: Manifest) -> Engine:
        engines.append(Mortal(WorkerConfig(model=MODEL, sim_slots=4, sim_itl_ms=5.0), manifest))
        return engines[-1]

    worker = await harness.start(build)
    assert worker.not_ready() == ""
    request_id = await harness.send(max_tokens=5000)
    await harness.tokens(request_id, 1)
    engines[0].dead = True
    event = await harness.event(request_id)
    assert (event.outcome, event.retryable, event.engine_death) == ("failed", True, True)
    await until(lambda: any(beat.state == "engine_down" for beat in harness.beats))
    await until(lambda: harness.beats[-1].state == "ready", "the engine does not come back")
    assert len(engines) == 2
    await harness.closed(await harness.send(max_tokens=3))


async def test_a_prompt_other_than_admitted_is_given_back_before_its_first_token_and_bills_nothing(
    harness: Harness, capsys: pytest.CaptureFixture[str]
) -> None:
    await harness.start()
    fields = {"messages": [{"role": "user", "content": "CANARY word word"}], "max_tokens": 3, "stream": True}
    body = msgspec.Raw(msgspec.json.encode(fields))
    digest = measured(simulated_prompts("chat/completions", fields))[1]
    row = failure_table.table()["engine makes other tokens of a prompt than the gateway"]
    before = row.figure(telemetry.page().decode())
    for admitted, of in ((6, ""), (8, ""), (6, digest), (7, "another")):
        sent = await harness.send(prompt_tokens=admitted, prompt_digest=of, max_output_tokens=3, body=body)
        event = await harness.event(sent)
        assert (event.outcome, event.given_back) == ("failed", True)
        assert (event.billable, event.completion_tokens, event.first_token_at_ms) == (False, 0, 0)
    log = capsys.readouterr().out
    assert log.count(row.log) == 4 and "CANARY" not in log
    assert row.figure(telemetry.page().decode()) == before + 4
    await harness.closed(await harness.send(prompt_tokens=7, prompt_digest=digest, max_output_tokens=3, body=body))


# Metrics ---------------------------------------------------------------------------------------------------


def metric(name: str, **labels: str) -> float:
    """A sample of this model's, 0 before the first."""
    return polling.metric(f"headrace_worker_{name}", model=MODEL, **labels)


async def test_every_metric_says_what_happened(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CHECK_S", 0.05)
    scope = {"version": "v1", "priority": "interactive", "workload": "short"}
    counted = {
        "attempts_total": {**scope, "outcome": "completed"},
        "prompt_tokens_total": scope,
        "prompt_tokens_cached_total": scope,
        "generation_tokens_total": scope,
        "time_to_first_token_seconds_count": scope,
        "inter_token_latency_seconds_count": scope,
        "engine_losses_total": {},
        "prompts_miscounted_total": {},
        "tokenizer_mismatches_total": {},
    }
    before = {name: metric(name, **labels) for name, labels in counted.items()}
    config = WorkerConfig(model=MODEL, sim_slots=4, sim_kv_tokens=100, sim_itl_ms=5.0)
    engines: list[Mortal] = []

    def build(manifest: Manifest) -> Engine:
        engines.append(Mortal(config, manifest))
        return engines[-1]

    await harness.start(build)
    assert (metric("kv_tokens"), metric("attempts_in_flight"), metric("kv_tokens_used")) == (100, 0, 0)
    prompt = {"messages": [{"role": "user", "content": "word " * 40}], "max_tokens": 3, "stream": True}
    for _ in range(2):
        body = msgspec.Raw(msgspec.json.encode(prompt))
        await harness.closed(await harness.send(prompt_tokens=44, max_output_tokens=3, body=body))
    await harness.event(await harness.send(prompt_tokens=43, max_output_tokens=3, body=body))
    await harness.event(await harness.send(tokenizer_fingerprint="theirs", body=body))
    # Both generate more than they reserved, so that the cache gets full.
    pair = [await harness.send(max_tokens=60, max_output_tokens=5, simulate={"itl_ms": 25}) for _ in range(2)]
    await until(lambda: metric("attempts_in_flight") == 2 and metric("kv_tokens_used") > 20)
    for request_id in pair:
        await harness.closed(request_id)
    await until(lambda: metric("num_preemptions") >= 1 and metric("attempts_in_flight") == 0)
    engines[0].dead = True
    await until(lambda: len(engines) == 2, "the engine is not rebuilt")

    gained = {name: metric(name, **labels) - before[name] for name, labels in counted.items()}
    assert gained == {
        "attempts_total": 4,
        "prompt_tokens_total": 2 * 44 + 2 * 7,
        "prompt_tokens_cached_total": 32,
        "generation_tokens_total": 2 * 3 + 2 * 60,
        "time_to_first_token_seconds_count": 4,
        "inter_token_latency_seconds_count": 2 * 2 + 2 * 59,
        "engine_losses_total": 1,
        "prompts_miscounted_total": 1,
        "tokenizer_mismatches_total": 1,
    }
    suffixes = ("_total", "_count")
    asked = {*counted, "versions_refused", "kv_tokens", "kv_tokens_used", "attempts_in_flight", "num_preemptions"}
    families = text_string_to_metric_families(telemetry.page().decode())
    declared = {family.name for family in families if family.name.startswith("headrace_worker_")}
    assert declared == {f"headrace_worker_{reduce(str.removesuffix, suffixes, name)}" for name in asked}


async def test_a_stall_is_found(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SAMPLE_S", 0.05)
    await harness.start(stall_s=0.5)
    steady = await harness.send(max_tokens=400)
    request_id = await harness.send(simulate={"hang_after": 1})
    await harness.tokens(steady, 1)
    event = await harness.event(request_id)
    assert (event.error_code, event.retryable, event.completion_tokens) == ("engine_error", True, 1)
    assert (await harness.closed(steady))[-1].kind == "end"


# Eviction --------------------------------------------------------------------------------------------------


async def test_an_evicted_worker_says_nothing_more_and_comes_back_under_a_new_name(harness: Harness) -> None:
    await harness.start()
    old = harness.worker
    request_id = await harness.send(max_tokens=5000)
    await harness.tokens(request_id, 2)
    assert (await harness.order(old, Evict(epoch=Epoch(1, 2)))).status == "ok"
    said = len(harness.frames(request_id))
    new = await harness.ready(old)
    assert harness.beats[-1].in_flight == [] and harness.beats[-1].epoch == Epoch(1, 2)
    harness.epoch = Epoch(1, 2)
    other = await harness.send(worker=new, max_tokens=3)
    await harness.closed(other)
    assert len(harness.frames(request_id)) - said <= 1, "at most what was on its way"
    assert await harness.no_event(request_id)
    await harness.work_done(left=1)  # The first one's, which is the scheduler's to take back.


# Repair ----------------------------------------------------------------------------------------------------


async def test_frames_can_be_asked_for_by_their_tenant_only(harness: Harness) -> None:
    await harness.start()
    request_id = await harness.send(max_tokens=20)
    frames = await harness.closed(request_id)
    assert await harness.repaired(harness.worker, request_id) == frames
    assert await harness.repaired(harness.worker, request_id, tenant="other") is None
    assert await harness.repaired(harness.worker, ids.request_id()) is None


class Cut:
    """A proxy before NATS that can cut its connections and then refuse new ones."""

    def __init__(self, url: str) -> None:
        self._near_port = free_port()
        self._far_port = int(url.rsplit(":", 1)[1])
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = f"nats://127.0.0.1:{self._near_port}"

    async def mend(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._near_port)

    def cut(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._far_port)
        pair = {writer, far_writer}
        self._writers |= pair
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            self._writers -= pair


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_a_cut_in_mid_stream_loses_no_frame_and_no_end(harness: Harness) -> None:
    cut = Cut(harness.url)
    await cut.mend()
    await harness.start(url=cut.url)
    name = harness.worker
    long = await harness.send(max_tokens=400)
    short = await harness.send(max_tokens=30)
    await harness.tokens(long, 5)
    cut.cut()
    await asyncio.sleep(0.5)
    await cut.mend()
    assert (await harness.event(long)).outcome == (await harness.event(short)).outcome == "completed"
    await harness.work_done()
    for request_id, count in ((long, 400), (short, 30)):
        frames = await harness.repaired(name, request_id)
        assert frames is not None
        assert [frame.seq for frame in frames] == list(range(len(frames)))
        assert len(texts(frames)) == count and frames[-1].kind == "end"
    seqs = [frame.seq for frame in harness.frames(long)]
    assert seqs == sorted(set(seqs)), "in order and once, over the cut"
    await harness.closed(await harness.send(max_tokens=3))
    await harness.close()
    cut.cut()


async def test_a_restart_of_the_server_loses_no_end(harness: Harness, nats: NatsServer) -> None:
    await harness.start()
    request_id = await harness.send(max_tokens=200)
    await harness.tokens(request_id, 5)
    nats.restart()
    assert (await harness.event(request_id)).outcome == "completed"
    await harness.work_done()
    again = await harness.send(max_tokens=3)
    assert (await harness.closed(again))[-1].kind == "end"


# Shutdown --------------------------------------------------------------------------------------------------


async def test_a_drain_lets_running_attempts_end_and_returns_what_waits(harness: Harness) -> None:
    worker = await harness.start(sim_kv_tokens=250)
    running = await harness.send(max_tokens=200)
    await harness.tokens(running, 1)
    waiting = await harness.send(max_tokens=200)
    await until(lambda: len(harness.beats[-1].in_flight) == 2)
    worker.stop()
    event = await harness.event(waiting)
    assert (event.error_code, event.retryable) == ("shutting_down", True)
    await until(lambda: harness.beats[-1].state == "draining")
    assert worker.not_ready() == "draining"
    assert len(texts(await harness.closed(running))) == 200
    await asyncio.wait_for(harness.workers[0][1], WAIT_S)
    await harness.work_done(left=1)


async def test_after_the_grace_time_streams_end_with_an_error_and_the_rest_is_returned(harness: Harness) -> None:
    worker = await harness.start(grace_s=0.1)
    stream = await harness.send(max_tokens=5000)
    gathered = await harness.send(max_tokens=5000, stream=False)
    await harness.tokens(stream, 1)
    await until(lambda: harness.frames(gathered))
    worker.stop()
    await asyncio.wait_for(harness.workers[0][1], WAIT_S)
    frames = await harness.closed(stream)
    assert msgspec.json.decode(frames[-1].data, type=ErrorData).code == "shutting_down"
    final, returned = await harness.event(stream), await harness.event(gathered)
    assert (final.outcome, final.retryable, final.billable) == ("failed", False, False)
    assert (returned.outcome, returned.retryable) == ("failed", True)
    await harness.work_done(left=1)


async def test_a_worker_that_the_bus_refuses_can_still_be_stopped(harness: Harness) -> None:
    await harness.bus.jetstream.api(f"STREAM.DELETE.{topology.WORK}")
    config = WorkerConfig(model=MODEL)
    worker = Worker(harness.bus, config, MANIFEST, partial(table.build, config))
    task = asyncio.create_task(worker.run())
    await until(lambda: worker.not_ready() == "joining")
    worker.stop()
    await asyncio.wait_for(task, WAIT_S)
    assert harness.beats == [], "not a word before it can get orders"


async def worker_process(url: str, directory: Path, **settings: str) -> asyncio.subprocess.Process:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
        "HEADRACE_NATS_URL": url,
        **settings,
    }
    with (directory / "worker.log").open("w") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "worker", env=environment, stderr=log, cwd=Path(__file__).parents[2]
        )


async def test_the_process_serves_and_leaves_with_0_on_sigterm(harness: Harness, tmp_path: Path) -> None:
    process = await worker_process(harness.url, tmp_path, HEADRACE_MODEL=MODEL, HEADRACE_SIM_ITL_MS="5")
    name = await harness.ready()
    request_id = await harness.send(worker=name, max_tokens=100, simulate={"tokens": [*words(99), "secret"]})
    await harness.tokens(request_id, 1)
    process.send_signal(signal.SIGTERM)
    frames = await harness.closed(request_id)
    assert len(texts(frames)) == 100
    assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
    lines = [msgspec.json.decode(line) for line in (tmp_path / "worker.log").read_text().splitlines()]
    ended = [line for line in lines if line["event"] == "attempt_ended"]
    assert [line["request_id"] for line in ended] == [request_id]
    assert "secret" not in str(lines) and "one two" not in str(lines)


async def test_the_process_without_a_manifest_waits_and_leaves_when_told(nats_url: str, tmp_path: Path) -> None:
    process = await worker_process(nats_url, tmp_path, HEADRACE_MODEL="nobody")
    await until(lambda: "manifest_awaited" in (tmp_path / "worker.log").read_text())
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


async def test_the_process_names_every_bad_setting(nats_url: str, tmp_path: Path) -> None:
    process = await worker_process(nats_url, tmp_path, HEADRACE_GRACE_S="soon", HEADRACE_SIM_SLOTS="many")
    assert await asyncio.wait_for(process.wait(), WAIT_S) == 2
    said = (tmp_path / "worker.log").read_text()
    assert all(name in said for name in ("HEADRACE_MODEL", "HEADRACE_GRACE_S", "HEADRACE_SIM_SLOTS"))
