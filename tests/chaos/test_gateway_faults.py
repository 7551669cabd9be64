"""Gateways that die or stop, callers that read slowly, and requests that come too late or after their cancel."""

import asyncio
import json
import signal
import socket
import time

import pytest

from contracts import ids, subjects
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.base import Codec
from contracts.messages.control import CancelAnswer, CancelRequest
from contracts.messages.request import RequestEnvelope
from tests.support.cluster import MODEL, TENANT, Cluster, Gateway, chat, counted, envelope
from tests.support.polling import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
CLUSTER = {"gateways": 2, "workers": 1, "sim_slots": 32, "sim_itl_ms": 20, "grace_s": 3}

_admission = Codec[AdmissionRequest](AdmissionRequest)
_admitted = Codec[AdmissionAnswer](AdmissionAnswer)
_cancel = Codec[CancelRequest](CancelRequest)
_cancelled = Codec[CancelAnswer](CancelAnswer)
_envelope = Codec[RequestEnvelope](RequestEnvelope)


async def test_generations_of_a_dead_gateway_are_cancelled_within_5_s(cluster: Cluster) -> None:
    """Its callers see a broken connection; what it had reserved comes back; the other gateway goes on."""
    dead = cluster.gateways[1]
    before = await cluster.newest()
    calls = [cluster.ask(gateway=1, stream=number % 2 == 0, max_tokens=2000) for number in range(6)]
    other = cluster.ask(max_tokens=300)
    await cluster.runs(7, 0)
    await other.shows(5)
    dead.kill()
    killed_at = time.monotonic()
    await cluster.runs(1, 0, 5)
    print(f"\ncancelled {time.monotonic() - killed_at:.1f} s after the kill")
    queue = await cluster.queue()
    assert queue is not None and queue.reserved_tokens == 305
    await other.done()
    assert other.complete and other.text == counted(300), other.story()
    for call in calls:
        await call.done(5)
        assert call.broke and not call.complete
    ends = [event for event in await cluster.events_since(before) if event.request_id != other.request_id]
    assert [event.outcome for event in ends] == ["cancelled"] * 6
    assert all(event.completion_tokens < 400 for event in ends)


async def test_a_gateway_that_is_told_to_stop(cluster: Cluster) -> None:
    """Not ready at once, what can finish finishes, the rest ends with an error, reservations come back."""
    stopped = cluster.gateways[1]
    short = [cluster.ask(gateway=1, max_tokens=60) for _ in range(3)]
    long = cluster.ask(gateway=1, max_tokens=2000)
    for call in [*short, long]:
        await call.shows(2)
    stopped.signal(signal.SIGTERM)
    began = time.monotonic()
    await until(lambda: _not_ready(stopped), "it says that it is not ready", 1)
    assert await stopped.exited(8) == 0
    print(f"\nended {time.monotonic() - began:.1f} s after SIGTERM; the grace time is 3 s")
    for call in short:
        await call.done()
        assert call.complete and call.text == counted(60), call.story()
    await long.done()
    assert long.endings == 1 and long.error["code"] == "shutting_down", long.story()
    (event,) = await cluster.ended(long.request_id)
    assert event.outcome == "cancelled" and event.completion_tokens >= long.tokens


async def _not_ready(gateway: Gateway) -> bool:
    return not await gateway.ready()


async def test_a_slow_reader_is_cut_off_and_disturbs_nobody(cluster: Cluster) -> None:
    """1 kB/s against 200,000 tokens as fast as they come, beside 20 streams at their own pace."""
    gateway = cluster.gateways[0]
    await cluster.serves()
    before = await cluster.newest()
    alone = [cluster.ask(max_tokens=80) for _ in range(20)]
    for call in alone:
        await call.done()
    gaps_alone = sorted(gap for call in alone for gap in call.gaps)
    rest_mib = gateway.memory_mib()
    body = {"model": MODEL, "stream": True, "messages": chat(["slow"]), "max_tokens": 200_000}
    slow = asyncio.create_task(asyncio.to_thread(read_slowly, cluster, gateway, body | {"simulate": {"itl_ms": 0}}))
    await cluster.runs(1, 0)
    others = [cluster.ask(max_tokens=80) for _ in range(20)]
    highest_mib = 0.0
    async with asyncio.timeout(90):
        while not all(call.over for call in others) or not await _is_quiet(cluster):
            highest_mib = max(highest_mib, gateway.memory_mib())
            await asyncio.sleep(0.1)
    for call in others:
        assert call.complete and call.text == counted(80), call.story()
    gaps = sorted(gap for call in others for gap in call.gaps)
    print(
        f"\ngateway memory {rest_mib:.0f} -> {highest_mib:.0f} MiB; gap between tokens of the others, 99 %: "
        f"{_p99(gaps_alone) * 1000:.0f} ms alone, {_p99(gaps) * 1000:.0f} ms beside the slow reader"
    )
    assert highest_mib - rest_mib < 25, "five times what the README says"
    assert _p99(gaps) < 5 * max(_p99(gaps_alone), 0.03), "others are not disturbed"
    events = [event for event in await cluster.events_since(before) if event.outcome != "completed"]
    assert [event.outcome for event in events] == ["cancelled"]
    text = await slow
    last, _ = json.JSONDecoder().raw_decode(text.rsplit("data: ", 1)[1])
    assert "[DONE]" not in text and last["error"]["code"] == "slow_reader"


async def _is_quiet(cluster: Cluster) -> bool:
    return await cluster.running() == (0, 0)


def _p99(values: list[float]) -> float:
    return values[int(len(values) * 0.99)]


def read_slowly(cluster: Cluster, gateway: Gateway, body: dict[str, object]) -> str:
    """All that comes: 1 kB/s for 6 s, then as fast as it can be had."""
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {cluster.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    received = bytearray()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(30)
        connection.connect(("127.0.0.1", gateway.port))
        connection.sendall(head.encode() + data)
        began = time.monotonic()
        while chunk := connection.recv(100 if time.monotonic() - began < 6 else 65536):
            received += chunk
            if time.monotonic() - began < 6:
                time.sleep(0.1)
    return received.decode(errors="replace")


# Ghosts ----------------------------------------------------------------------------------------------------


def asked(request_id: str) -> bytes:
    return _admission.encode(
        AdmissionRequest(
            request_id=request_id,
            tenant=TENANT,
            key_id="k",
            model=MODEL,
            endpoint="chat/completions",
            prompt_tokens=5,
            max_output_tokens=16,
            stream=True,
        )
    )


async def test_a_publish_that_timed_out_and_is_stored_after_its_cancel_never_runs(cluster: Cluster) -> None:
    request_id = ids.request_id()
    async with cluster.bus() as bus:
        answer = _admitted.decode(await bus.request(subjects.admit(MODEL), asked(request_id)))
        cancel = _cancel.encode(CancelRequest(request_id=request_id, reason="publish_unconfirmed"))
        assert _cancelled.decode(await bus.request(subjects.gateway_cancel(MODEL, TENANT), cancel)).durable
        message = envelope(request_id, admitted_at_ms=answer.admitted_at_ms)
        await bus.jetstream.store(subjects.request(MODEL, TENANT), _envelope.encode(message), msg_id=request_id)
    (event,) = await cluster.ended(request_id)
    assert (event.outcome, event.attempt) == ("cancelled", 0)


async def test_a_cancel_that_overtakes_even_the_admission_holds(cluster: Cluster) -> None:
    request_id = ids.request_id()
    async with cluster.bus() as bus:
        cancel = _cancel.encode(CancelRequest(request_id=request_id))
        assert _cancelled.decode(await bus.request(subjects.cancel(MODEL, TENANT), cancel)).durable
        answer = _admitted.decode(await bus.request(subjects.admit(MODEL), asked(request_id)))
        assert not answer.admitted and answer.code == "cancelled"
        message = envelope(request_id)
        await bus.jetstream.store(subjects.request(MODEL, TENANT), _envelope.encode(message), msg_id=request_id)
    (event,) = await cluster.ended(request_id)
    assert (event.outcome, event.attempt) == ("cancelled", 0)


async def test_a_request_that_is_stored_after_its_time_never_runs(cluster: Cluster) -> None:
    """Its reservation has expired; what comes in later is dropped as expired, though nobody cancelled it."""
    request_id = ids.request_id()
    async with cluster.bus() as bus:
        message = envelope(request_id, publish_within_ms=-1)
        await bus.jetstream.store(subjects.request(MODEL, TENANT), _envelope.encode(message), msg_id=request_id)
    (event,) = await cluster.ended(request_id)
    assert (event.outcome, event.attempt) == ("expired", 0)


async def test_the_large_body_of_a_dead_gateway_leaves_the_store(cluster: Cluster) -> None:
    call = cluster.ask(gateway=1, words=["large"] * 60_000, max_tokens=2000)
    await call.shows(2)
    assert await cluster.stored("BODIES") > 0
    cluster.gateways[1].kill()
    await cluster.quiet()


@pytest.mark.slow
async def test_an_admission_that_is_never_published_lapses(cluster: Cluster) -> None:
    """10 s until it must be stored, 2 s of patience; then the tokens come back without anybody's word."""
    async with cluster.bus() as bus:
        assert _admitted.decode(await bus.request(subjects.admit(MODEL), asked(ids.request_id()))).admitted
    assert await cluster.running() == (0, 1)
    await cluster.quiet(14)
