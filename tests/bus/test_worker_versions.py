"""A worker and its version on a real server: fetched, verified, proven before it serves; switched on command."""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts import registry, subjects, topology
from contracts.artifacts import fetch, publish, stores
from contracts.artifacts.files import publishable
from contracts.artifacts.stores import BusParts
from contracts.bus import Bus
from contracts.messages.base import Epoch
from contracts.messages.control import ControlAnswer, SwitchVersion, WorkerHeartbeat
from contracts.messages.records import Golden, Manifest
from contracts.service import telemetry
from tests.support import failure_table
from tests.support.file_server import FileServer
from tests.support.models import safetensors
from tests.support.polling import until
from tests.support.worker_harness import MANIFEST, MODEL, Harness, texts, words
from worker.config import WorkerConfig
from worker.engines import supervisor, table
from worker.service import Worker


@pytest.fixture
async def harness(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Harness]:
    monkeypatch.setattr(supervisor, "REBUILD_S", 0.1)
    monkeypatch.setattr(stores, "PAUSE_S", 0.01)
    bus = await Bus.connect(nats_url, name="test")
    harness = Harness(bus, nats_url)
    await harness.open()
    yield harness
    await harness.close()
    await bus.close()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    for shard in (1, 2):
        (directory / f"model-{shard}.safetensors").write_bytes(safetensors({"a": os.urandom(5000)}))
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return directory


async def enter(harness: Harness, version: str, **fields: Any) -> Manifest:
    """A version of the model, whatever is wrong with it."""
    manifest = msgspec.structs.replace(MANIFEST, **{"version": version, "tokenizer_fingerprint": "", **fields})
    await registry.put_version(harness.bus, manifest)
    return manifest


async def enter_files(harness: Harness, version: str, directory: Path, **fields: Any) -> Manifest:
    files = publishable(directory)
    artifacts = publish.described(files, lambda *_: None)
    if "path" not in fields:
        await publish.upload(BusParts(harness.bus), files, artifacts, lambda *_: None)
    return await enter(harness, version, artifacts=artifacts, **fields)


async def switch(harness: Harness, worker: str, version: str) -> None:
    order = SwitchVersion(epoch=harness.epoch, version=version)
    data = await harness.bus.request(subjects.control(worker), msgspec.json.encode(order), timeout_s=10)
    assert msgspec.json.decode(data, type=ControlAnswer).status == "ok"


async def start(harness: Harness, manifest: Manifest, cache: Path) -> Worker:
    """A worker that may never be ready."""
    config = WorkerConfig(model=MODEL, cache=str(cache), sim_itl_ms=5.0)
    worker = Worker(harness.bus, config, manifest, lambda found: table.build(config, found))
    harness.workers.append((worker, asyncio.create_task(worker.run())))
    return worker


def last(harness: Harness, version: str, state: str) -> WorkerHeartbeat | None:
    """The latest heartbeat of that version, when it is in that state."""
    beats = [beat for beat in harness.beats if beat.version == version]
    return beats[-1] if beats and beats[-1].state == state else None


async def reaches(harness: Harness, version: str, state: str) -> WorkerHeartbeat:
    found: WorkerHeartbeat = await until(lambda: last(harness, version, state), f"{version} does not get {state}")
    return found


# Loading ---------------------------------------------------------------------------------------------------


async def test_a_published_version_is_fetched_verified_and_served(
    harness: Harness, files: Path, tmp_path: Path
) -> None:
    await start(harness, await enter_files(harness, "v2", files), tmp_path / "cache")
    await reaches(harness, "v2", "ready")
    blobs = tmp_path / "cache" / "artifacts" / "blobs"
    assert len([file for file in blobs.iterdir() if not file.suffix]) == 5, "two of the six are alike"


Harm = Callable[[Path], object]


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 4
    file.write_bytes(data)


IN_PLACE: dict[str, tuple[str, Harm, str]] = {
    "a truncated weight file": ("model-1.safetensors", lambda it: os.truncate(it, 300), "bytes, the manifest says"),
    "a flipped bit": ("model-2.safetensors", flip, "has the sha256"),
    "a swapped tokenizer": ("tokenizer.json", lambda it: it.write_text("[]"), "tokenizer.json has"),
    "a changed chat template": ("chat_template.jinja", lambda it: it.write_text("{{a}}"), "chat_template.jinja has"),
    "a missing shard": ("model-2.safetensors", Path.unlink, "model-2.safetensors"),
    "no directory": ("", shutil.rmtree, "cannot be read"),
}
"""Files of a published directory that workers read in place: what is done to which, and what is said of it."""

BY_MANIFEST: dict[str, tuple[dict[str, Any], str]] = {
    "an engine that does not start": ({"engine_arguments": {"fails_to_start": True}}, "does not start"),
    "another golden answer": ({"golden": Golden(prompt="a b", text="what nobody says")}, "golden answer differs"),
    "another tokenizer": (
        {"engine_arguments": {"counts_as": "theirs"}, "tokenizer_fingerprint": "ours"},
        "counts tokens otherwise",
    ),
}
ON_THE_WAY = {
    "parts that nobody has": "is missing in the store",
    "a full disk": "no room for",
    "a download cut at half": "cannot be had from http",
    "a registry that answers 500": "cannot be had from http",
}


@contextmanager
def on_the_way(fault: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """While the files are under way; gives where they lie, if not in the bus."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    if fault == "a full disk":
        usage = shutil.disk_usage(files)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=fetch.FREE_BYTES_MIN + 100))
    if "500" not in fault and "cut" not in fault:
        yield ""
        return
    with FileServer(files) as server:
        server.status, server.cut = (500, False) if "500" in fault else (0, True)
        yield server.url


async def faulty(harness: Harness, fault: str, files: Path, url: str) -> Manifest:
    if fault in BY_MANIFEST:
        return await enter(harness, "v2", **BY_MANIFEST[fault][0])
    if fault in IN_PLACE:
        name, harm, _ = IN_PLACE[fault]
        manifest = await enter_files(harness, "v2", files, path=str(files))
        harm(files / name)
        return manifest
    manifest = await enter_files(harness, "v2", files, **({"path": url} if url else {}))
    if fault == "parts that nobody has":
        await harness.bus.jetstream.purge(topology.PARTS, "part.v1.>")
    return manifest


FAULTS = {name: row[1] for name, row in BY_MANIFEST.items()} | {name: row[2] for name, row in IN_PLACE.items()}
FAULTS |= ON_THE_WAY


@pytest.mark.parametrize("fault", FAULTS)
async def test_what_is_wrong_with_a_version_is_said_it_never_serves_and_the_one_before_serves_on(
    harness: Harness,
    files: Path,
    tmp_path: Path,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [failure_table.table()["version cannot be had, or is not what was published"]]
    if fault == "another tokenizer":
        rows.append(failure_table.table()["worker counts tokens otherwise than was published"])
    before = [row.figure(telemetry.page().decode()) for row in rows]
    await start(harness, await enter(harness, "v1b"), tmp_path / "cache")
    first = await reaches(harness, "v1b", "ready")
    with on_the_way(fault, files, monkeypatch) as url:
        manifest = await faulty(harness, fault, files, url)
        await switch(harness, first.worker, "v2")
        beat = await until(
            lambda: (now := last(harness, "v1b", "ready")) and now.reason.startswith("v2 refused") and now, "no refusal"
        )
        assert FAULTS[fault] in beat.reason
        fresh = await start(harness, manifest, tmp_path / "other")
        failed = await reaches(harness, "v2", "failed")
        assert FAULTS[fault] in failed.reason and fresh.not_ready() == f"failed: {failed.reason}"
        said = capsys.readouterr().out
        for row, figure in zip(rows, before, strict=True):
            assert row.figure(telemetry.page().decode()) > figure and row.log in said
        frames = await harness.closed(
            await harness.send(worker=beat.worker, version="v1b", simulate={"tokens": words(2)})
        )
        assert texts(frames) == words(2)
        assert not any(each.version == "v2" and each.state == "ready" for each in harness.beats)


async def test_a_version_that_cannot_be_had_is_tried_again_until_it_can(
    harness: Harness, files: Path, tmp_path: Path
) -> None:
    hidden = files.rename(tmp_path / "hidden")
    described = publish.described(publishable(hidden), lambda *_: None)
    manifest = await enter(harness, "v2", artifacts=described, path=str(files))
    await start(harness, manifest, tmp_path / "cache")
    await reaches(harness, "v2", "failed")
    hidden.rename(files)
    assert (await reaches(harness, "v2", "ready")).reason == ""


# Switching -------------------------------------------------------------------------------------------------


async def test_a_switch_lets_running_streams_end_and_joins_with_the_new_version(
    harness: Harness, tmp_path: Path
) -> None:
    await start(harness, await enter(harness, "v1b"), tmp_path / "cache")
    first = await reaches(harness, "v1b", "ready")
    await enter(harness, "v2")
    running = await harness.send(worker=first.worker, version="v1b", simulate={"tokens": words(60), "itl_ms": 10})
    await harness.tokens(running, 3)
    await switch(harness, first.worker, "v2")
    await switch(harness, first.worker, "v2")  # a repeated order is the same order
    beat = await reaches(harness, "v1b", "draining")
    assert beat.reason == "switching to v2"
    assert texts(await harness.closed(running)) == words(60)
    assert (await harness.event(running)).version == "v1b"
    second = await reaches(harness, "v2", "ready")
    assert second.worker != first.worker and second.reason == ""
    repaired = await harness.repaired(first.worker, running)
    assert repaired is not None and texts(repaired) == words(60), "who missed frames still gets them"
    frames = await harness.closed(await harness.send(worker=second.worker, version="v2", simulate={"tokens": words(2)}))
    assert texts(frames) == words(2)
    await switch(harness, second.worker, "v1b")
    assert (await reaches(harness, "v1b", "ready")).worker not in (first.worker, second.worker)


async def test_an_order_of_a_deposed_owner_switches_nothing(harness: Harness, tmp_path: Path) -> None:
    await start(harness, await enter(harness, "v1b"), tmp_path / "cache")
    first = await reaches(harness, "v1b", "ready")
    await enter(harness, "v2")
    await switch(harness, first.worker, "v1b")
    stale = SwitchVersion(epoch=Epoch(0, 1), version="v2")
    data = await harness.bus.request(subjects.control(first.worker), msgspec.json.encode(stale), timeout_s=10)
    assert msgspec.json.decode(data, type=ControlAnswer).status == "stale"
    frames = await harness.closed(await harness.send(worker=first.worker, version="v1b", simulate={"tokens": words(2)}))
    assert texts(frames) == words(2)


async def test_a_worker_killed_in_the_middle_of_a_load_goes_on_where_it_was(
    harness: Harness, files: Path, tmp_path: Path
) -> None:
    size = 12 * (16 << 20)
    (files / "model-1.safetensors").write_bytes(safetensors({"a": os.urandom(size)}))
    manifest = await enter_files(harness, "v2", files)
    await registry.set_stable(harness.bus, MODEL, "v2")
    blobs = tmp_path / "cache" / "artifacts" / "blobs"
    digest = manifest.artifacts["model-1.safetensors"].sha256

    async def run() -> asyncio.subprocess.Process:
        environment = os.environ | {
            "HEADRACE_NATS_URL": harness.url,
            "HEADRACE_MODEL": MODEL,
            "HEADRACE_CACHE": str(tmp_path / "cache"),
        }
        with (tmp_path / "worker.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "worker", env=environment, stdout=log, stderr=log
            )

    first = await run()
    partial = blobs / f"{digest}.partial"
    await until(lambda: partial.exists() and partial.stat().st_blocks * 512 > 2 * (16 << 20), "nothing is fetched")
    first.send_signal(signal.SIGKILL)
    await first.wait()
    assert not (blobs / digest).exists()
    second = await run()
    try:
        await reaches(harness, "v2", "ready")
        assert (blobs / digest).stat().st_size == (files / "model-1.safetensors").stat().st_size
        assert not partial.exists()
        stages = {beat.reason.split(":")[0] for beat in harness.beats if beat.state == "starting"}
        assert stages <= {"", "fetching v2", "verifying v2", "starting the engine with v2", "warming up v2"}
        total = sum(artifact.size for artifact in manifest.artifacts.values())
        told = [beat.loading for beat in harness.beats if beat.loading is not None]
        assert {(each.version, each.total_bytes) for each in told} == {("v2", total)}
        assert any(0 < each.done_bytes < total for each in told)
        assert harness.beats[-1].loading is None
    finally:
        second.terminate()
        await second.wait()
