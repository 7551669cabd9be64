"""A scheduler process on a real NATS server: what it makes of the streams that it finds."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from contracts import ids, registry, subjects, topology
from contracts.bus import Bus, BusError
from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.control import CancelAnswer, CancelRequest, StatusAnswer, StatusRequest
from contracts.messages.records import Manifest
from contracts.messages.request import Reply, RequestEnvelope
from tests.support.nats_server import NatsServer
from tests.support.polling import until

MODEL = "m"
TENANT = "acme"
MANIFEST = Manifest(name=MODEL, version="v1", engine="simulated", context=1000, default_output_tokens=16)

Start = Callable[[], subprocess.Popen[bytes]]


@pytest.fixture
def start(nats: NatsServer, tmp_path: Path) -> Iterator[Start]:
    """Start a scheduler; all of them write to one log."""
    started: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {"HEADRACE_NATS_URL": nats.url, "HEADRACE_LOG_FORMAT": "json"}

    def run() -> subprocess.Popen[bytes]:
        with (tmp_path / "log").open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", "scheduler"], env=environment, stdout=log, stderr=log)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def logged(tmp_path: Path, event: str) -> int:
    lines = (tmp_path / "log").read_bytes().splitlines()
    return sum(msgspec.json.decode(line).get("event") == event for line in lines if line.startswith(b"{"))


async def ask(bus: Bus, subject: str, question: msgspec.Struct, timeout_s: float = 20.0) -> bytes:
    """The owner's answer, as soon as there is an owner."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await bus.request(subject, msgspec.json.encode(question), timeout_s=1.0)
        except BusError:
            assert time.monotonic() < deadline, f"nobody answers on {subject}"
            await asyncio.sleep(0.05)


async def is_empty(bus: Bus, stream: str) -> bool:
    return not (await bus.jetstream.api(f"STREAM.INFO.{stream}"))["state"]["messages"]


async def admit(bus: Bus) -> tuple[str, AdmissionAnswer]:
    request_id = ids.request_id()
    asked = AdmissionRequest(
        request_id=request_id,
        tenant=TENANT,
        key_id="k",
        model=MODEL,
        endpoint="chat/completions",
        prompt_tokens=10,
        max_output_tokens=10,
    )
    return request_id, msgspec.json.decode(await ask(bus, subjects.admit(MODEL), asked), type=AdmissionAnswer)


async def test_what_nobody_can_read_is_dropped_and_blocks_nothing(bus: Bus, start: Start, tmp_path: Path) -> None:
    await registry.put_manifest(bus, MANIFEST)
    await bus.jetstream.store(subjects.request(MODEL, TENANT), b"not JSON", msg_id="a")
    await bus.jetstream.store(subjects.work(MODEL, "v1", "w-1"), b'{"attempt": "one"}', msg_id="b")
    start()
    _, answer = await admit(bus)
    assert answer.admitted, answer
    for stream in (topology.REQUESTS, topology.WORK):
        await until(partial(is_empty, bus, stream))
    assert logged(tmp_path, "request_undecodable") == 1
    assert logged(tmp_path, "work_undecodable") == 1


async def test_an_end_is_logged_once_whoever_reads_it_later(bus: Bus, start: Start, tmp_path: Path) -> None:
    await registry.put_manifest(bus, MANIFEST)
    first = start()
    request_id, answer = await admit(bus)
    assert answer.admitted, answer
    now_ms = time.time_ns() // 1_000_000
    envelope = RequestEnvelope(
        request_id=request_id,
        tenant=TENANT,
        key_id="k",
        model=MODEL,
        endpoint="chat/completions",
        stream=True,
        prompt_tokens=10,
        max_output_tokens=10,
        choices=1,
        priority="interactive",
        admitted_at_ms=now_ms,
        publish_by_ms=now_ms + 10_000,
        deadline_at_ms=now_ms + 60_000,
        reply=Reply(subject="", stream=""),
        body=msgspec.Raw(b"{}"),
    )
    await bus.jetstream.store(subjects.request(MODEL, TENANT), msgspec.json.encode(envelope), msg_id=request_id)
    left = CancelRequest(request_id=request_id, reason="client_cancelled")
    cancelled = msgspec.json.decode(await ask(bus, subjects.cancel(MODEL, TENANT), left), type=CancelAnswer)
    assert cancelled.durable and cancelled.outcome == "cancelled"
    await until(lambda: logged(tmp_path, "attempt_ended_by_scheduler") == 1)
    first.kill()
    first.wait()
    start()
    await until(lambda: logged(tmp_path, "model_owned") == 2, limit_s=20.0)
    question = StatusRequest(request_id=request_id)
    known = msgspec.json.decode(await ask(bus, subjects.status(MODEL, TENANT), question), type=StatusAnswer)
    assert (known.state, known.outcome) == ("ended", "cancelled"), "the new owner has read the event"
    assert logged(tmp_path, "attempt_ended_by_scheduler") == 1
