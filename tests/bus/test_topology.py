"""The streams and buckets: made once, by any number of processes at a time; differences are told, not mended."""

import asyncio

import pytest

from contracts import topology
from contracts.bus import BusError
from tests.support.nats_server import Connect, NatsServer


async def test_many_at_once_make_everything_once(connect: Connect) -> None:
    buses = await asyncio.gather(*(connect() for _ in range(6)))
    assert await asyncio.gather(*(topology.ensure(bus) for bus in buses)) == [[]] * 6
    made = {stream["name"] for stream in topology.STREAMS}
    assert set((await buses[0].jetstream.api("STREAM.NAMES"))["streams"]) == made
    assert {topology.REQUESTS, topology.WORK, topology.ATTEMPTS, topology.DEAD_LETTERS} < made


async def test_ensuring_again_after_a_restart_changes_nothing(nats: NatsServer, connect: Connect) -> None:
    bus = await connect()
    await topology.ensure(bus)
    await bus.jetstream.store("req.v1.m.t", b"1", msg_id="1")
    nats.restart()
    assert await topology.ensure(bus) == []
    assert await bus.jetstream.last(topology.REQUESTS, "req.v1.m.t") is not None


async def test_drift_is_one_line_per_setting_and_nothing_is_changed(connect: Connect) -> None:
    bus = await connect()
    await bus.jetstream.api(
        "STREAM.CREATE.WORK",
        {"name": "WORK", "subjects": ["work.v1.>"], "retention": "limits", "storage": "file", "discard": "old"},
    )
    drift = await topology.ensure(bus)
    assert "WORK: retention is 'limits', should be 'workqueue'" in drift
    assert "WORK: discard is 'old', should be 'new'" in drift
    assert "WORK: max_bytes is -1, should be 536870912" in drift
    assert all(line.startswith("WORK: ") for line in drift)
    assert await topology.ensure(bus) == drift


async def test_replicas_are_the_operators(connect: Connect) -> None:
    assert all("num_replicas" not in stream for stream in topology.STREAMS)


async def test_a_server_without_room_says_so(nats_binary: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("small")
    config = directory / "nats.conf"
    config.write_text("jetstream { max_file_store: 1MB }")
    server = NatsServer(nats_binary, directory, "-c", str(config))
    server.start()
    try:
        bus = await topology.Bus.connect(server.url, name="test")
        with pytest.raises(BusError, match="insufficient storage"):
            await topology.ensure(bus)
        await bus.close()
    finally:
        server.stop()


async def test_leases_may_expire_and_work_is_a_queue(connect: Connect) -> None:
    bus = await connect()
    await topology.ensure(bus)
    leases = (await bus.jetstream.api("STREAM.INFO.KV_leases"))["config"]
    assert leases["allow_msg_ttl"] and leases["subject_delete_marker_ttl"] > 0
    for name in (topology.REQUESTS, topology.WORK):
        config = (await bus.jetstream.api(f"STREAM.INFO.{name}"))["config"]
        assert config["retention"] == "workqueue" and config["discard"] == "new" and config["allow_direct"]
