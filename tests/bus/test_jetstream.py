"""Storing and reading back, over time-outs, restarts and wiped stores."""

import asyncio
import time

import pytest

from contracts import topology
from contracts.bus import Bus, BusError, NotFound, StreamFull, TooLarge, Unavailable, Unconfirmed, WrongSequence
from tests.support.nats_server import Connect, NatsServer
from tests.support.polling import metric, until

EVENT = "attempt.v1.m.r.1"


async def stored(bus: Bus, stream: str = topology.ATTEMPTS) -> list[bytes]:
    return [message.data async for message in bus.jetstream.read(stream, ">")]


async def test_a_message_is_stored_once_by_its_id(bus: Bus) -> None:
    assert await bus.jetstream.store(EVENT, b"1", msg_id="r.1") == (1, False)
    assert await bus.jetstream.store(EVENT, b"1", msg_id="r.1") == (1, True)
    assert await stored(bus) == [b"1"]


async def test_a_store_that_timed_out_and_happened_after_all_does_not_double(nats: NatsServer, bus: Bus) -> None:
    unconfirmed = metric("headrace_bus_stores_unconfirmed_total")
    nats.freeze()
    with pytest.raises(Unconfirmed):
        await bus.jetstream.store(EVENT, b"1", msg_id="r.1", timeout_s=0.2)
    assert metric("headrace_bus_stores_unconfirmed_total") == unconfirmed + 1
    nats.thaw()
    await bus.session.barrier()
    assert await stored(bus) == [b"1"]
    assert (await bus.jetstream.store(EVENT, b"1", msg_id="r.1")).duplicate
    assert await stored(bus) == [b"1"]


async def test_a_store_over_a_freeze_is_tried_again_with_the_same_id(nats: NatsServer, bus: Bus) -> None:
    retries = metric("headrace_bus_store_retries_total")
    nats.freeze()
    storing = asyncio.create_task(bus.jetstream.store(EVENT, b"1", msg_id="r.1"))
    await until(lambda: metric("headrace_bus_store_retries_total") > retries)
    nats.thaw()
    assert (await storing).seq == 1
    assert await stored(bus) == [b"1"]


@pytest.mark.parametrize("expect_last", [None, 0])
async def test_a_store_over_a_restart_is_stored_once(nats: NatsServer, bus: Bus, expect_last: int | None) -> None:
    nats.stop()
    storing = asyncio.create_task(bus.jetstream.store(EVENT, b"1", msg_id="r.1", expect_last=expect_last))
    await asyncio.sleep(0.2)
    nats.start()
    assert (await storing).seq == 1
    assert await stored(bus) == [b"1"]


async def test_stores_that_go_on_through_kills_are_all_there_once(nats: NatsServer, bus: Bus) -> None:
    async def store_all(writer: int) -> None:
        for number in range(100):
            name = f"{writer}-{number}"
            await bus.jetstream.store(f"attempt.v1.m.{name}.1", name.encode(), msg_id=name, expect_last=0, timeout_s=20)

    storing = asyncio.gather(*(store_all(writer) for writer in range(8)))
    for _ in range(2):
        await asyncio.sleep(0.15)
        nats.restart()
    await storing
    messages = await stored(bus)
    assert len(messages) == len(set(messages)) == 800


async def test_the_first_stored_wins_and_the_loser_learns_what_won(bus: Bus) -> None:
    """The server looks at the expectation before the id, so a repeat of the winner is told apart by reading
    back.
    """
    assert await bus.jetstream.store(EVENT, b"lost", msg_id="r.1.lost", expect_last=0) == (1, False)
    with pytest.raises(WrongSequence) as refused:
        await bus.jetstream.store(EVENT, b"completed", msg_id="r.1", expect_last=0)
    assert refused.value.found is not None and refused.value.found.data == b"lost"
    assert await bus.jetstream.store(EVENT, b"lost", msg_id="r.1.lost", expect_last=0) == (1, True)
    with pytest.raises(WrongSequence):
        await bus.jetstream.store(EVENT, b"other", msg_id="r.1.lost", expect_last=0)


async def test_the_expectation_is_safe_where_ids_are_forgotten(nats: NatsServer, bus: Bus) -> None:
    """Ids of deleted messages are forgotten on a restart; a subject that still has its event is not."""
    await bus.jetstream.store(EVENT, b"1", msg_id="r.1", expect_last=0)
    nats.restart(15)
    assert (await bus.jetstream.store(EVENT, b"1", msg_id="r.1", expect_last=0)).duplicate
    assert await stored(bus) == [b"1"]


async def test_a_full_stream_refuses(bus: Bus) -> None:
    await bus.jetstream.api(
        "STREAM.CREATE.SMALL",
        {
            "name": "SMALL",
            "subjects": ["small.>"],
            "storage": "memory",
            "discard": "new",
            "max_msgs_per_subject": 1,
            "discard_new_per_subject": True,
            "max_bytes": 2000,
            "max_msg_size": 1900,
        },
    )
    await bus.jetstream.store("small.a", b"", msg_id="1")
    with pytest.raises(StreamFull, match="per subject"):
        await bus.jetstream.store("small.a", b"", msg_id="2")
    await bus.jetstream.store("small.b", bytes(1500), msg_id="3")
    with pytest.raises(StreamFull, match="bytes"):
        await bus.jetstream.store("small.c", bytes(1500), msg_id="4")
    with pytest.raises(TooLarge):
        await bus.jetstream.store("small.d", bytes(1950), msg_id="5")
    assert (await bus.jetstream.store("small.a", b"", msg_id="1")).duplicate


async def test_reading_single_messages(bus: Bus) -> None:
    before = time.time_ns() // 1_000_000
    await bus.jetstream.store(EVENT, b"1", msg_id="a")
    await bus.jetstream.store(EVENT, b"2", msg_id="b")
    last = await bus.jetstream.last(topology.ATTEMPTS, EVENT)
    assert last is not None
    assert (last.subject, last.data, last.stream_seq, last.headers["Nats-Msg-Id"]) == (EVENT, b"2", 2, "b")
    assert before <= last.stored_at_ms <= time.time_ns() // 1_000_000
    first = await bus.jetstream.get(topology.ATTEMPTS, 1)
    assert first is not None and first.data == b"1"
    for seq in (1, 1, 99):  # gone already is no error
        await bus.jetstream.delete(topology.ATTEMPTS, seq)
    assert await bus.jetstream.get(topology.ATTEMPTS, 1) is None
    assert await bus.jetstream.purge(topology.ATTEMPTS, "attempt.v1.m.>") == 1
    assert await bus.jetstream.last(topology.ATTEMPTS, EVENT) is None


async def test_what_the_leader_has_and_a_follower_lacks_is_found(bus: Bus) -> None:
    await bus.jetstream.store(EVENT, b"1", msg_id="a", expect_last=0)
    found = await bus.jetstream._from_leader(topology.ATTEMPTS, {"last_by_subj": EVENT})
    direct = await bus.jetstream.last(topology.ATTEMPTS, EVENT)
    assert found is not None and direct is not None
    assert (found.subject, found.data, found.stream_seq, found.stored_at_ms) == (
        direct.subject,
        direct.data,
        direct.stream_seq,
        direct.stored_at_ms,
    )
    assert found.headers["Nats-Msg-Id"] == "a"


async def test_reading_everything_is_in_order_in_batches_and_ends(bus: Bus) -> None:
    for number in range(0, 1200, 100):
        await asyncio.gather(
            *(bus.jetstream.store(f"attempt.v1.m.{n}.1", b"%d" % n, msg_id=str(n)) for n in range(number, number + 100))
        )
    await bus.jetstream.store("attempt.v1.other.r.1", b"other", msg_id="other")
    seqs = []
    async for message in bus.jetstream.read(topology.ATTEMPTS, "attempt.v1.m.>"):
        seqs.append(message.stream_seq)
        if len(seqs) % 300 == 0:
            await bus.jetstream.store(f"attempt.v1.m.late{len(seqs)}.1", b"late", msg_id=f"late{len(seqs)}")
    assert seqs[:1200] == list(range(1, 1201))
    assert len(seqs) <= 1204
    assert [m.stream_seq async for m in bus.jetstream.read(topology.ATTEMPTS, "attempt.v1.m.>", start_seq=1198)][
        :3
    ] == [1198, 1199, 1200]
    assert [m async for m in bus.jetstream.read(topology.ATTEMPTS, "attempt.v1.none.>")] == []


async def test_reading_large_messages_goes_by_bytes(bus: Bus) -> None:
    for number in range(12):
        await bus.jetstream.store(f"dead.v1.{number}", bytes([number]) * 900_000, msg_id=str(number))
    assert [m.data[0] async for m in bus.jetstream.read(topology.DEAD_LETTERS, "dead.v1.>")] == list(range(12))


async def test_reading_goes_on_over_a_restart(nats: NatsServer, bus: Bus) -> None:
    await asyncio.gather(*(bus.jetstream.store(f"attempt.v1.m.{n}.1", b"", msg_id=str(n)) for n in range(700)))
    seqs = []
    async for message in bus.jetstream.read(topology.ATTEMPTS, "attempt.v1.>"):
        seqs.append(message.stream_seq)
        if len(seqs) == 500:
            nats.restart()
    assert seqs == list(range(1, 701))


async def test_a_missing_stream_is_a_clear_error(nats: NatsServer, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    nats.wipe()
    await until(lambda: bus.session.reconnects == 1)
    with pytest.raises(Unconfirmed, match="not confirmed"):
        await bus.jetstream.store(EVENT, b"1", msg_id="r.1", timeout_s=0.5)
    with pytest.raises(NotFound, match="stream not found"):
        await bus.jetstream.purge(topology.ATTEMPTS, EVENT)
    with pytest.raises(NotFound):
        await bus.kv.times_ns(topology.LEASES)
    monkeypatch.setattr("contracts.bus.jetstream.API_TIMEOUT_S", 0.5)
    with pytest.raises(Unavailable, match="no such stream"):
        await stored(bus)
    with pytest.raises(Unavailable):
        await bus.jetstream.get(topology.ATTEMPTS, 1)
    await topology.ensure(bus)
    assert (await bus.jetstream.store(EVENT, b"1", msg_id="r.1")).seq == 1


async def test_what_the_server_refuses_is_an_error_with_its_words(bus: Bus) -> None:
    with pytest.raises(BusError, match="10056"):
        await bus.jetstream.api("STREAM.CREATE.X", {"name": "Y"})


async def test_an_ack_that_no_consumer_takes_is_not_confirmed(bus: Bus) -> None:
    unconfirmed = metric("headrace_bus_acks_unconfirmed_total")
    assert not await bus.session.confirm_ack("$JS.ACK.WORK.gone.1.1.1.1.0")
    assert metric("headrace_bus_acks_unconfirmed_total") == unconfirmed + 1
    with pytest.raises(BusError):
        await bus.session.confirm_ack("attempt.v1.m.r.1")


async def test_headers_of_the_caller_are_left_alone(connect: Connect, bus: Bus) -> None:
    headers = {"K": "v"}
    await bus.publish("a", b"", headers=headers)
    assert headers == {"K": "v"}
