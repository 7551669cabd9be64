"""A caller leaves: at any instant the request ends as cancelled, once, and everything it held comes back."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from contracts import ids, subjects
from contracts.bus import Bus, Incoming
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.base import Codec
from contracts.messages.control import CancelAnswer, CancelRequest
from contracts.messages.request import RequestEnvelope
from tests.support.cluster import MODEL, TENANT, Call, Cluster, envelope
from tests.support.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTER = {"sim_slots": 2, "sim_itl_ms": 20}

STALE_STEPS = 40
"""Steps of the engine (20 ms) since the heartbeat that a test has read: sent each 500 ms, read by polling."""
LATE_STEPS = 25
"""Steps between a hang-up and its effect: the way over gateway, scheduler and worker on a busy machine, in tokens. The
engine itself takes one (tests/conformance)."""

STREAMING = pytest.mark.parametrize("stream", [True, False], ids=["streaming", "gathered"])

_admission = Codec[AdmissionRequest](AdmissionRequest)
_admitted = Codec[AdmissionAnswer](AdmissionAnswer)
_cancel = Codec[CancelRequest](CancelRequest)
_cancelled = Codec[CancelAnswer](CancelAnswer)
_envelope = Codec[RequestEnvelope](RequestEnvelope)


@asynccontextmanager
async def heard(cluster: Cluster, subject: str) -> AsyncIterator[None]:
    """Wait, at the end, until the bus has carried a message on ``subject`` that was sent since the beginning."""
    messages: list[Incoming] = []
    async with cluster.bus() as bus:
        await bus.subscribe(subject, messages.append)
        yield
        await until(lambda: messages, f"a message on {subject}")


async def open_request(cluster: Cluster) -> str:
    """Id of the one request that is open; a caller of a gathered answer does not know it before its end."""

    async def found() -> str:
        queue = await cluster.queue()
        assert queue is not None
        held = [progress.request_id for beat in queue.workers for progress in beat.in_flight]
        return held[0] if held else ""

    request_id: str = await until(found, "a worker holds the request")
    return request_id


async def leaves_while_held(cluster: Cluster, call: Call, after_tokens: int = 0) -> None:
    """The caller hangs up once the worker has its request: cancelled at once, with the tokens made until then."""
    request_id = await open_request(cluster)
    if after_tokens:

        async def enough() -> bool:
            queue = await cluster.queue()
            assert queue is not None
            return any(one.completion_tokens >= after_tokens for beat in queue.workers for one in beat.in_flight)

        await until(enough, "tokens are generated")
    seen = call.tokens or after_tokens + STALE_STEPS
    await call.leave()
    (event,) = await cluster.ended(request_id)
    assert event.outcome == "cancelled" and event.reporter == "worker"
    if after_tokens:
        assert after_tokens <= event.completion_tokens <= seen + LATE_STEPS and event.billable
    else:
        assert event.completion_tokens == 0 and not event.billable
    await cluster.quiet(2)


@STREAMING
async def test_in_admission(cluster: Cluster, stream: bool) -> None:
    """The scheduler does not answer; the caller leaves; what it then admits is never run."""
    scheduler = cluster.schedulers[0]
    before = await cluster.newest()
    scheduler.freeze()
    async with heard(cluster, subjects.admit(MODEL)):
        call = cluster.ask(stream=stream, max_tokens=5)
    async with heard(cluster, subjects.gateway_cancel(MODEL, TENANT)):
        await call.leave()
    scheduler.thaw()
    await cluster.quiet()
    await cluster.serves()
    new = await cluster.events_since(before)
    assert [event.outcome for event in new if event.worker] == ["completed"], "only the second one ran"
    assert all(event.outcome == "cancelled" and not event.attempt for event in new if not event.worker)


@STREAMING
async def test_between_publish_and_queue(cluster: Cluster, stream: bool) -> None:
    """REQUESTS holds it, the scheduler has not seen it yet: the cancel may arrive first or last."""
    scheduler = cluster.schedulers[0]
    request_id = ids.request_id()
    async with cluster.bus() as bus:
        question = _admission.encode(
            AdmissionRequest(
                request_id=request_id,
                tenant=TENANT,
                key_id="k",
                model=MODEL,
                endpoint="chat/completions",
                prompt_tokens=5,
                max_output_tokens=16,
                stream=stream,
            )
        )
        answer = _admitted.decode(await bus.request(subjects.admit(MODEL), question))
        assert answer.admitted
        scheduler.freeze()
        message = envelope(request_id, stream=stream, admitted_at_ms=answer.admitted_at_ms)
        await bus.jetstream.store(subjects.request(MODEL, TENANT), _envelope.encode(message), msg_id=request_id)
        async with heard(cluster, subjects.cancel(MODEL, TENANT)):
            cancelling = asyncio.create_task(cancel(bus, request_id))
        scheduler.thaw()
        assert await cancelling == CancelAnswer(durable=True, outcome="cancelled")
    (event,) = await cluster.ended(request_id)
    assert (event.outcome, event.attempt, event.completion_tokens) == ("cancelled", 0, 0)


@STREAMING
async def test_queued(cluster: Cluster, stream: bool) -> None:
    """Both slots are busy: who leaves the queue never runs, and those behind move up."""
    before = await cluster.newest()
    busy = [cluster.ask(max_tokens=100) for _ in range(2)]
    await cluster.runs(2, 0)
    leaving = [cluster.ask(stream=stream, max_tokens=50) for _ in range(5)]
    await cluster.runs(2, 5)
    behind = cluster.ask(max_tokens=1)
    await cluster.runs(2, 6)
    for call in leaving:
        await call.leave()
    await cluster.runs(2, 1, 2)
    for call in [*busy, behind]:
        await call.done()
        assert call.complete, call.story()
    await cluster.quiet()
    cancelled = [event for event in await cluster.events_since(before) if event.outcome == "cancelled"]
    assert [(event.attempt, event.worker, event.completion_tokens) for event in cancelled] == [(0, "", 0)] * 5


@STREAMING
async def test_dispatched_and_not_pulled(cluster: Cluster, stream: bool) -> None:
    """WORK holds it and its worker stands still: it ends when the worker says that it will not start it."""
    worker = cluster.workers[0]
    before = await cluster.newest()
    worker.freeze()
    call = cluster.ask(stream=stream, max_tokens=50)
    await until(lambda: cluster.stored("WORK"), "the request is dispatched")
    async with heard(cluster, subjects.control(worker.joined_as)):
        await call.leave()
    worker.thaw()
    await cluster.quiet()
    (event,) = await cluster.events_since(before)
    assert (event.outcome, event.completion_tokens, event.billable) == ("cancelled", 0, False)


@STREAMING
async def test_pulled_and_not_submitted(cluster: Cluster, stream: bool) -> None:
    await leaves_while_held(cluster, cluster.ask(stream=stream, simulate={"submit_delay_ms": 30_000}))


@STREAMING
async def test_prefilling(cluster: Cluster, stream: bool) -> None:
    await leaves_while_held(cluster, cluster.ask(stream=stream, simulate={"ttft_ms": 30_000}))


@STREAMING
async def test_generating(cluster: Cluster, stream: bool) -> None:
    await leaves_while_held(cluster, cluster.ask(stream=stream, max_tokens=2000), after_tokens=20)


async def test_the_slot_of_one_who_left_is_free_within_a_second(cluster: Cluster) -> None:
    busy = [cluster.ask(max_tokens=1000) for _ in range(2)]
    for call in busy:
        await call.shows(5)
    waiting = cluster.ask(max_tokens=2)
    await cluster.runs(2, 1)
    left_at = time.monotonic()
    await busy[0].leave()
    await waiting.done()
    assert waiting.complete, waiting.story()
    print(f"\nfirst token of the next one in line {waiting.first_at - left_at:.3f} s after the hang-up")
    assert waiting.first_at - left_at < 1
    await busy[1].leave()


@STREAMING
async def test_finished(cluster: Cluster, stream: bool) -> None:
    """A cancel that comes too late is acknowledged with the end that stands."""
    call = await cluster.ask(stream=stream, max_tokens=3).done()
    assert call.complete, call.story()
    async with cluster.bus() as bus:
        for _ in range(3):
            answer = await cancel(bus, call.request_id)
            assert answer == CancelAnswer(durable=True, outcome="completed")
    (event,) = await cluster.events(call.request_id)
    assert event.outcome == "completed" and event.completion_tokens == 3


async def test_repeated_cancels_make_one_end(cluster: Cluster) -> None:
    call = cluster.ask(max_tokens=2000)
    await call.shows(5)
    async with cluster.bus() as bus:
        answers = await asyncio.gather(*(cancel(bus, call.request_id) for _ in range(8)))
        answers.append(await cancel(bus, call.request_id))
    assert answers == [CancelAnswer(durable=True, outcome="cancelled")] * 9
    await call.done()
    assert call.endings == 1 and call.error["code"] == "cancelled", call.story()
    assert len(await cluster.events(call.request_id)) == 1


async def cancel(bus: Bus, request_id: str) -> CancelAnswer:
    """What the scheduler says to a cancel."""
    data = _cancel.encode(CancelRequest(request_id=request_id))
    return _cancelled.decode(await bus.request(subjects.cancel(MODEL, TENANT), data, timeout_s=5))
