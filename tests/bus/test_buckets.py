"""Keys, leases, watches and objects."""

import asyncio
import os

import pytest

from contracts import topology
from contracts.bus import Bus, BusError, KvEntry, StreamFull, WrongSequence
from contracts.topology import BODIES, KEYS, LEASES
from tests.support.nats_server import Connect, NatsServer
from tests.support.polling import until


class View:
    """What a watch has told, and how often."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.told = 0

    def tell(self, key: str, entry: KvEntry | None) -> None:
        self.told += 1
        if entry is None:
            del self.keys[key]
        else:
            self.keys[key] = entry.value


async def test_keys_are_written_read_and_deleted(bus: Bus) -> None:
    assert await bus.kv.get(KEYS, "a") is None
    assert await bus.kv.put(KEYS, "a", b"1") == 1
    entry = await bus.kv.get(KEYS, "a")
    assert entry is not None
    assert (entry.key, entry.value, entry.revision) == ("a", b"1", 1)
    assert entry.created_at_ms > 1_700_000_000_000
    assert await bus.kv.create(KEYS, "b.c", b"2") == 2
    assert {key: e.value for key, e in (await bus.kv.all(KEYS)).items()} == {"a": b"1", "b.c": b"2"}
    await bus.kv.delete(KEYS, "a")
    await bus.kv.delete(KEYS, "never")
    assert await bus.kv.get(KEYS, "a") is None
    assert list(await bus.kv.all(KEYS)) == ["b.c"]
    assert await bus.kv.create(KEYS, "a", b"again") > 3


async def test_compare_and_set(bus: Bus) -> None:
    revision = await bus.kv.create(KEYS, "a", b"1")
    with pytest.raises(WrongSequence):
        await bus.kv.create(KEYS, "a", b"2")
    updated = await bus.kv.update(KEYS, "a", b"2", revision=revision)
    with pytest.raises(WrongSequence):
        await bus.kv.update(KEYS, "a", b"3", revision=revision)
    with pytest.raises(WrongSequence):
        await bus.kv.delete(KEYS, "a", revision=revision)
    await bus.kv.delete(KEYS, "a", revision=updated)
    with pytest.raises(WrongSequence):
        await bus.kv.update(KEYS, "a", b"3", revision=updated)


@pytest.mark.parametrize("key", ["", ".a", "a.", "a..b", "a b", "a\r\nPUB x 0", "*", ">", "a.>", "ä"])
async def test_odd_keys_are_refused(bus: Bus, key: str) -> None:
    with pytest.raises(BusError):
        await bus.kv.put(KEYS, key, b"")


async def test_a_lease_expires_is_seen_to_and_is_taken_over(bus: Bus) -> None:
    """The marker of an expired key is in a plain create's way; one of many contenders gets the lease."""
    view = View()
    await bus.kv.watch(LEASES, view.tell)
    held = await bus.kv.create(LEASES, "m", b"old", ttl_s=1)
    await until(lambda: view.keys == {"m": b"old"})
    held = await bus.kv.update(LEASES, "m", b"old", revision=held, ttl_s=1)
    await until(lambda: view.keys == {})
    assert await bus.kv.get(LEASES, "m") is None
    assert await bus.kv.all(LEASES) == {}
    takers = await asyncio.gather(
        *(bus.kv.create(LEASES, "m", b"%d" % n, ttl_s=5) for n in range(5)), return_exceptions=True
    )
    assert [type(taker) for taker in takers].count(WrongSequence) == 4
    with pytest.raises(WrongSequence):
        await bus.kv.update(LEASES, "m", b"old", revision=held, ttl_s=5)
    await until(lambda: len(view.keys) == 1)


async def test_a_lease_that_is_refreshed_stays(bus: Bus) -> None:
    revision = await bus.kv.create(LEASES, "m", b"x", ttl_s=1)
    for _ in range(4):
        await asyncio.sleep(0.4)
        revision = await bus.kv.update(LEASES, "m", b"x", revision=revision, ttl_s=1)
    assert await bus.kv.get(LEASES, "m") is not None


async def test_writing_over_a_freeze_is_no_conflict_with_ourselves(nats: NatsServer, bus: Bus) -> None:
    """The first try is stored and its answer is late: the second is refused by what the first wrote."""
    nats.freeze()
    creating = asyncio.create_task(bus.kv.create(KEYS, "a", b"1"))
    await asyncio.sleep(1.3)
    nats.thaw()
    assert await creating == 1
    nats.freeze()
    updating = asyncio.create_task(bus.kv.update(KEYS, "a", b"2", revision=1))
    await asyncio.sleep(1.3)
    nats.thaw()
    assert await updating == 2


async def test_a_watch_first_tells_what_is_there_then_every_change(bus: Bus) -> None:
    view, narrow = View(), View()
    for number in range(50):
        await bus.kv.put(KEYS, f"k.{number}", b"%d" % number)
    await bus.kv.delete(KEYS, "k.0")
    await bus.kv.watch(KEYS, view.tell)
    await bus.kv.watch(KEYS, narrow.tell, "other.*")
    assert view.keys == {f"k.{number}": b"%d" % number for number in range(1, 50)}
    assert view.told == 49
    assert narrow.told == 0
    await bus.kv.put(KEYS, "k.1", b"new")
    await bus.kv.delete(KEYS, "k.2")
    await bus.kv.put(KEYS, "other.a", b"x")
    await until(lambda: view.told == 52 and narrow.keys == {"other.a": b"x"})
    assert view.keys["k.1"] == b"new" and "k.2" not in view.keys


async def test_a_watch_goes_on_soon_after_a_restart_and_tells_only_what_changed(
    nats: NatsServer, bus: Bus, connect: Connect
) -> None:
    """The library's watch came back after 19.7 s."""
    view = View()
    for key in ("stays", "goes", "changes"):
        await bus.kv.put(KEYS, key, b"1")
    await bus.kv.watch(KEYS, view.tell)
    nats.stop()
    await until(lambda: not bus.connected)
    nats.start()
    writer = await connect()
    await writer.kv.delete(KEYS, "goes")
    await writer.jetstream.purge(f"KV_{KEYS}", f"$KV.{KEYS}.goes")  # no marker tells of it
    await writer.kv.put(KEYS, "changes", b"2")
    await until(lambda: view.keys == {"stays": b"1", "changes": b"2"})
    await writer.kv.put(KEYS, "live", b"3")
    await until(lambda: "live" in view.keys)
    assert view.told == 6


async def test_a_watch_survives_a_raising_handler(bus: Bus) -> None:
    keys: list[str] = []

    def bad(key: str, entry: KvEntry | None) -> None:
        keys.append(key)
        raise RuntimeError("bad")

    await bus.kv.put(KEYS, "a", b"")
    await bus.kv.watch(KEYS, bad)
    await bus.kv.put(KEYS, "b", b"")
    await until(lambda: keys == ["a", "b"])


async def test_a_watch_of_a_wiped_store_tells_that_all_is_gone(nats: NatsServer, bus: Bus) -> None:
    view = View()
    await bus.kv.put(KEYS, "a", b"1")
    await bus.kv.put(KEYS, "b", b"1")
    await bus.kv.watch(KEYS, view.tell)
    created, now = await bus.kv.times_ns(KEYS)
    assert created < now
    nats.wipe()
    await until(lambda: bus.session.reconnects == 1)
    await topology.ensure(bus)
    await bus.kv.put(KEYS, "b", b"2")  # revision 1 again
    await until(lambda: view.keys == {"b": b"2"})
    assert (await bus.kv.times_ns(KEYS))[0] > now


async def test_objects_are_whole_or_not_there(bus: Bus) -> None:
    data = os.urandom(1_500_000)
    digest = await bus.objects.put(BODIES, "body.v1.m.t.r1", data)
    assert await bus.objects.get(BODIES, "body.v1.m.t.r1", size=len(data), digest=digest) == data
    await bus.objects.put(BODIES, "body.v1.m.t.r2", b"small")
    await bus.objects.put(BODIES, "body.v1.other.t.r3", b"small")
    assert set(await bus.objects.subjects(BODIES, "body.v1.m.*.*")) == {"body.v1.m.t.r1", "body.v1.m.t.r2"}
    assert await bus.objects.subjects(BODIES, "body.v1.none.*.*") == {}
    await bus.objects.delete(BODIES, "body.v1.m.t.r2")
    await bus.objects.delete(BODIES, "body.v1.m.t.r2")
    assert await bus.objects.get(BODIES, "body.v1.m.t.r2", size=5, digest="") is None
    with pytest.raises(BusError, match="damaged"):
        await bus.objects.get(BODIES, "body.v1.m.t.r1", size=len(data), digest="")
    (last,) = [m async for m in bus.jetstream.read(BODIES, "body.v1.m.>")][-1:]
    await bus.jetstream.delete(BODIES, last.stream_seq)
    with pytest.raises(BusError, match="damaged"):
        await bus.objects.get(BODIES, "body.v1.m.t.r1", size=len(data), digest=digest)
    await bus.objects.delete(BODIES, "body.v1.m.t.r1")
    assert set(await bus.objects.subjects(BODIES, "body.v1.>")) == {"body.v1.other.t.r3"}


async def test_an_object_that_does_not_fit_leaves_nothing_behind(bus: Bus) -> None:
    config = (await bus.jetstream.api(f"STREAM.INFO.{BODIES}"))["config"]
    await bus.jetstream.api(f"STREAM.UPDATE.{BODIES}", {**config, "max_bytes": 400_000})
    with pytest.raises(StreamFull):
        await bus.objects.put(BODIES, "body.v1.m.t.big", bytes(1_000_000))
    assert (await bus.jetstream.api(f"STREAM.INFO.{BODIES}"))["state"]["messages"] == 0
