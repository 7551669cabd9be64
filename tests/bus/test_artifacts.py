"""Files of versions on a real server: stored in parts, fetched again, and each fault a clear refusal."""

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from contracts import subjects, topology
from contracts.artifacts import fetch, publish, stores
from contracts.artifacts.fetch import Cache
from contracts.artifacts.files import BadArtifact, publishable
from contracts.artifacts.stores import BusParts, PlainFiles, UrlParts, source_of, store_at
from contracts.bus import Bus
from contracts.messages import records
from contracts.messages.records import Manifest
from tests.support.file_server import FileServer
from tests.support.models import safetensors
from tests.support.nats_server import NatsServer

PART = 1 << 18
"""Small parts: two pieces each, many parts in a small file."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (records, publish, fetch):
        monkeypatch.setattr(module, "PART_BYTES", PART)
    monkeypatch.setattr("contracts.artifacts.files.PART_BYTES", PART)
    monkeypatch.setattr(stores, "PAUSE_S", 0.01)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"max_position_embeddings": 64}')
    (directory / "tokenizer.json").write_text("{}")
    shards = {f"w{number}": f"model-{number}.safetensors" for number in (1, 2)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    for number, name in enumerate(shards.values()):
        (directory / name).write_bytes(safetensors({f"w{number}": os.urandom(5 * PART + 1000 + number)}))
    return directory


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", 1 << 40)


def blobs(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "artifacts" / "blobs").iterdir())


def quiet(*_: object) -> None:
    pass


async def publish_to(target: stores.PartStore, directory: Path, **fields: Any) -> Manifest:
    files = publishable(directory)
    artifacts = publish.described(files, quiet)
    await publish.upload(target, files, artifacts, quiet)
    return manifest_of(artifacts, **fields)


def manifest_of(artifacts: dict[str, records.Artifact], **fields: Any) -> Manifest:
    given: dict[str, Any] = {"engine": "vllm", "context": 64, "default_output_tokens": 16, **fields}
    return Manifest(name="m", version="v1", artifacts=artifacts, **given)


def contents(directory: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in directory.iterdir()}


Where = Literal["bus", "file", "memory"]


@pytest.mark.parametrize("where", ["bus", "file", "memory"])
async def test_what_was_published_is_fetched_byte_for_byte(
    bus: Bus, model: Path, cache: Cache, tmp_path: Path, where: Where
) -> None:
    url = {"bus": "", "file": f"file://{tmp_path}/store", "memory": "memory://models"}[where]
    manifest = await publish_to(store_at(url, bus), model, store=url)
    seen: list[tuple[int, int]] = []
    directory = await cache.fetch(
        manifest, source_of(manifest, bus), progress=lambda done, total: seen.append((done, total))
    )
    assert contents(directory) == contents(model)
    assert seen[0][0] == 0 and seen[-1][0] == seen[-1][1] == sum(file.stat().st_size for file in model.iterdir())
    assert (tmp_path / "cache" / "artifacts").stat().st_mode & 0o777 == 0o700


async def test_what_is_fetched_is_checked_by_its_name_in_the_version(
    bus: Bus, model: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cache files have other names: large weights are weights there, too, and code that is named is found."""
    monkeypatch.setattr("contracts.artifacts.files.COMPANION_BYTES_MAX", PART)
    manifest = await publish_to(BusParts(bus), model)
    await cache.fetch(manifest, source_of(manifest, bus))
    files = publishable(model)
    files["config.json"].write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
    artifacts = publish.described(files, quiet)
    await publish.upload(BusParts(bus), files, artifacts, quiet)
    manifest = manifest_of(artifacts)
    with pytest.raises(BadArtifact, match=r"config\.json names code to run \(auto_map\)"):
        await cache.fetch(manifest, source_of(manifest, bus))


async def test_a_plain_directory_is_served_where_it_lies(bus: Bus, model: Path, cache: Cache, tmp_path: Path) -> None:
    (model / "README.md").write_text("not published")
    manifest = manifest_of(publish.described(publishable(model), quiet), path=str(model))
    (model / "chat_template.jinja").write_text("{{ 'what nobody published' }}")
    directory = await cache.fetch(manifest, source_of(manifest, bus))
    assert set(contents(directory)) == set(manifest.artifacts), "an engine sees no other file"
    assert blobs(tmp_path) == []
    far = manifest_of(manifest.artifacts, path=f"file://{model}")
    assert set(contents(await cache.fetch(far, source_of(far, bus)))) == set(manifest.artifacts)
    assert len(blobs(tmp_path)) >= 5, "by URL it is copied"


async def test_in_place_a_cache_that_cannot_be_written_will_do(bus: Bus, model: Path, tmp_path: Path) -> None:
    """As in a container whose image has the files."""
    (tmp_path / "cache").write_text("no directory")
    manifest = manifest_of(publish.described(publishable(model), quiet), path=str(model))
    directory = await Cache(tmp_path / "cache", 1 << 40).fetch(manifest, source_of(manifest, bus))
    assert contents(directory) == contents(model)
    shutil.rmtree(directory.parent)
    stored = await publish_to(BusParts(bus), model)
    with pytest.raises(BadArtifact, match="the cache"):
        await Cache(tmp_path / "cache", 1 << 40).fetch(stored, source_of(stored, bus))


async def test_who_counts_gets_the_tokenizers_files_alone(bus: Bus, model: Path, cache: Cache, tmp_path: Path) -> None:
    stored = await publish_to(BusParts(bus), model)
    assert set(contents(await fetch.tokenizer_files(cache, bus, stored))) == {"tokenizer.json"}
    in_place = manifest_of(stored.artifacts, path=str(model))
    assert await fetch.tokenizer_files(cache, bus, in_place) == model
    (model / "chat_template.jinja").write_text("{{ 'what nobody published' }}")
    with pytest.raises(BadArtifact, match="was not published"):
        await fetch.tokenizer_files(cache, bus, in_place)
    (model / "chat_template.jinja").unlink()
    (model / "tokenizer.json").write_text("[]")
    with pytest.raises(BadArtifact, match="has the sha256"):
        await fetch.tokenizer_files(cache, bus, in_place)


async def test_an_upload_that_was_cut_off_goes_on(bus: Bus, model: Path, cache: Cache) -> None:
    store = BusParts(bus)
    begun: list[str] = []
    sent: list[str] = []
    """Stored for sure: those under way are given up with the one that is cut off."""

    class Cut(BusParts):
        async def put(self, digest: str, data: bytes) -> None:
            if len(begun) == 4:
                raise BadArtifact("cut off")
            begun.append(digest)
            await super().put(digest, data)
            sent.append(digest)

    with pytest.raises(BadArtifact, match="cut off"):
        await publish_to(Cut(bus), model)
    await bus.jetstream.store(subjects.part("f" * 64), b"half", msg_id="half")  # of another that was cut off
    again: list[str] = []

    class Watched(BusParts):
        async def put(self, digest: str, data: bytes) -> None:
            again.append(digest)
            await super().put(digest, data)

    manifest = await publish_to(Watched(bus), model)
    assert set(again).isdisjoint(sent) and len(set(again)) == len(again)
    assert contents(await cache.fetch(manifest, store)) == contents(model)


async def test_a_download_that_was_cut_at_half_goes_on(bus: Bus, model: Path, cache: Cache, tmp_path: Path) -> None:
    manifest = await publish_to(BusParts(bus), model)
    asked: list[tuple[str, int]] = []

    class Counting(BusParts):
        async def part(self, path: str, artifact: records.Artifact, index: int) -> bytes:
            if len(asked) == 5:
                raise BadArtifact("the wire was cut")
            asked.append((path, index))
            return await super().part(path, artifact, index)

    with pytest.raises(BadArtifact, match="the wire was cut"):
        await cache.fetch(manifest, Counting(bus))
    assert [file.suffix for file in blobs(tmp_path)].count(".partial") == 1
    begun = list(asked)
    asked[:] = [("", -1)] * 6
    await cache.fetch(manifest, Counting(bus))
    assert not set(begun) & set(asked)
    assert not any(file.suffix == ".partial" for file in blobs(tmp_path))


async def test_versions_share_what_they_have_in_common(bus: Bus, model: Path, cache: Cache, tmp_path: Path) -> None:
    await cache.fetch(await publish_to(BusParts(bus), model), BusParts(bus))
    pieces, kept = await bus.objects.subjects(topology.PARTS, "part.v1.*"), set(blobs(tmp_path))
    (model / "config.json").write_text('{"max_position_embeddings": 65}')
    await cache.fetch(await publish_to(BusParts(bus), model), BusParts(bus))
    assert len(await bus.objects.subjects(topology.PARTS, "part.v1.*")) == len(pieces) + 1
    assert {file for file in set(blobs(tmp_path)) - kept if file.suffix == ""} == {
        file for file in blobs(tmp_path) if file.read_bytes() == b'{"max_position_embeddings": 65}'
    }


# Faults: each a refusal that says what is wrong ------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def shorten(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "a flipped bit": ("model-1.safetensors", flip, "has the sha256"),
    "truncated weights": ("model-2.safetensors", truncate, "bytes, the manifest says"),
    "weights without their last byte": ("model-2.safetensors", shorten, "bytes, the manifest says"),
    "a swapped tokenizer": ("tokenizer.json", lambda file: file.write_text("[]"), "has the sha256"),
    "a missing shard": ("model-1.safetensors", Path.unlink, "cannot be read"),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_directory_in_place_is_not_loaded(bus: Bus, model: Path, cache: Cache, damage: str) -> None:
    manifest = manifest_of(publish.described(publishable(model), quiet), path=str(model))
    name, spoil, says = DAMAGES[damage]
    spoil(model / name)
    with pytest.raises(BadArtifact, match=says) as refused:
        await cache.fetch(manifest, source_of(manifest, bus))
    assert name in str(refused.value)


@pytest.mark.parametrize("spoil", [flip, truncate])
async def test_a_damaged_cache_is_found_before_the_load_and_mended_by_the_next(
    bus: Bus, model: Path, cache: Cache, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    manifest = await publish_to(BusParts(bus), model)
    directory = await cache.fetch(manifest, BusParts(bus))
    spoil((directory / "model-1.safetensors").resolve())
    with pytest.raises(BadArtifact, match=r"model-1\.safetensors has"):
        await cache.fetch(manifest, BusParts(bus))
    assert contents(await cache.fetch(manifest, BusParts(bus))) == contents(model)


async def test_a_part_that_is_missing_or_damaged_in_the_bus_is_named(bus: Bus, model: Path, cache: Cache) -> None:
    manifest = await publish_to(BusParts(bus), model)
    place = subjects.part(manifest.artifacts["model-1.safetensors"].parts[2])
    pieces = await bus.objects.subjects(topology.PARTS, place)
    await bus.objects.delete(topology.PARTS, place)
    with pytest.raises(BadArtifact, match=r"part 2 of model-1\.safetensors is missing"):
        await cache.fetch(manifest, BusParts(bus))
    for number in range(pieces[place]):
        await bus.jetstream.store(place, b"nonsense", msg_id=f"n{number}")
    with pytest.raises(BadArtifact, match=r"part 2 of model-1\.safetensors is damaged"):
        await cache.fetch(manifest, BusParts(bus))


async def test_a_full_disk_is_a_refusal_and_leaves_nothing(
    bus: Bus, model: Path, cache: Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = await publish_to(BusParts(bus), model)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: usage._replace(free=fetch.FREE_BYTES_MIN + 1000))
        with pytest.raises(BadArtifact, match="no room for"):
            await cache.fetch(manifest, BusParts(bus))
    assert blobs(tmp_path) == []

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(BadArtifact, match="is full"):
            await cache.fetch(manifest, BusParts(bus))
    assert [file.name for file in blobs(tmp_path) if file.suffix != ".lock"] == []


async def test_a_full_bus_takes_no_parts_and_goes_on_serving(tmp_path: Path, model: Path, nats_binary: str) -> None:
    wanted = sum(max(0, stream["max_bytes"]) for stream in topology.STREAMS)
    settings = tmp_path / "nats.conf"
    settings.write_text(f"jetstream {{ max_file_store: {wanted + (32 << 20)} }}")
    server = NatsServer(nats_binary, tmp_path, "-c", str(settings))
    server.start()
    try:
        bus = await Bus.connect(server.url, name="test")
        await topology.ensure(bus)
        (model / "model-3.safetensors").write_bytes(safetensors({"w": os.urandom(40 << 20)}))
        with pytest.raises(BadArtifact, match="the bus has no room for"):
            await publish_to(BusParts(bus), model)
        assert await bus.objects.subjects(topology.PARTS, "part.v1.*") == {}
        await bus.jetstream.store("req.v1.m.t", b"1", msg_id="1")
        await bus.close()
    finally:
        server.stop()


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


async def test_a_server_that_fails_or_cuts_is_tried_again_and_then_named(
    bus: Bus, model: Path, cache: Cache, no_proxies: None
) -> None:
    pytest.importorskip("aiohttp")
    with FileServer(model) as server:
        manifest = manifest_of(publish.described(publishable(model), quiet), path=server.url)
        server.status = 500
        with pytest.raises(BadArtifact, match="cannot be had from http"):
            await cache.fetch(manifest, PlainFiles(manifest.path))
        server.status, server.cut = 0, True
        with pytest.raises(BadArtifact, match="cannot be had from http"):
            await cache.fetch(manifest, PlainFiles(manifest.path))
        server.cut = False
        assert contents(await cache.fetch(manifest, PlainFiles(manifest.path))) == contents(model)


async def test_a_source_by_url_goes_on_where_it_was_cut(model: Path, tmp_path: Path, no_proxies: None) -> None:
    pytest.importorskip("aiohttp")
    with FileServer(model) as server:
        url = server.url
        server.cut = True
        with pytest.raises(BadArtifact, match="run it again"):
            await asyncio.to_thread(publish.download, url, tmp_path / "incoming", quiet)
        server.cut = False
        files = await asyncio.to_thread(publish.download, url, tmp_path / "incoming", quiet)
        assert {path: file.read_bytes() for path, file in files.items()} == contents(model)
        server.status = 500
        with pytest.raises(BadArtifact):
            await asyncio.to_thread(publish.download, url, tmp_path / "other", quiet)


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "s3://user:secret@bucket/x", "python://x", "https://me@host/x", "github://a:b@/x"]
)
async def test_urls_that_are_none_of_ours(url: str) -> None:
    with pytest.raises(BadArtifact):
        UrlParts(url)


async def test_the_cache_is_bounded_and_keeps_what_is_used(bus: Bus, model: Path, tmp_path: Path) -> None:
    size = sum(file.stat().st_size for file in model.iterdir())
    cache = Cache(tmp_path / "cache", size + 1000)
    first = await publish_to(BusParts(bus), model)
    await cache.fetch(first, BusParts(bus))
    for file in model.glob("*.safetensors"):
        flip(file)
    directory = await cache.fetch(await publish_to(BusParts(bus), model), BusParts(bus))
    assert contents(directory) == contents(model)
    assert sum(file.stat().st_size for file in blobs(tmp_path)) <= size + 1000
    assert len(list((tmp_path / "cache" / "artifacts" / "versions").iterdir())) == 1


async def test_what_no_version_refers_to_is_collected_and_its_room_given_back(bus: Bus, model: Path) -> None:
    store = BusParts(bus)
    manifest = await publish_to(store, model)
    large = (await bus.jetstream.api("STREAM.INFO.PARTS"))["config"]["max_bytes"]
    used = set(manifest.artifacts["config.json"].parts)
    assert await store.keep_only(used) == sum(len(each.parts) for each in manifest.artifacts.values()) - 1
    info = await bus.jetstream.api("STREAM.INFO.PARTS")
    assert info["state"]["messages"] == 1 and info["config"]["max_bytes"] < large
    assert await topology.ensure(bus) == []
