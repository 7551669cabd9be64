"""Reading a stream live: every message once and in order, over restarts, losses and wiped stores."""

import asyncio
import time

import pytest

from contracts import topology
from contracts.bus import Bus, Handler, Incoming, NotFound, OrderedConsumer, ordered
from tests.support.nats_server import Connect, NatsServer
from tests.support.polling import until

STREAM = topology.ATTEMPTS


@pytest.fixture(autouse=True)
def _as_in_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that are alone have heartbeats ten times as far apart."""
    monkeypatch.setattr(ordered, "HEARTBEAT_ALONE_S", ordered.HEARTBEAT_S)


async def store(bus: Bus, *numbers: int) -> None:
    for number in numbers:
        name = f"{time.time_ns()}-{number}"
        await bus.jetstream.store(f"attempt.v1.m.{name}.1", b"%d" % number, msg_id=name, timeout_s=20)


class Reader:
    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.pending: list[int] = []

    def take(self, message: Incoming) -> None:
        self.numbers.append(int(message.data))
        self.pending.append(message.pending)


async def follow(bus: Bus, handler: Handler, *, start_seq: int | None = None) -> OrderedConsumer:
    return await OrderedConsumer(bus.jetstream, STREAM, "attempt.v1.>", handler, start_seq=start_seq).start()


async def consumers(bus: Bus, stream: str = STREAM) -> list[str]:
    return (await bus.jetstream.api(f"CONSUMER.NAMES.{stream}"))["consumers"] or []


async def test_starts_at_new_at_a_sequence_or_at_a_time(bus: Bus) -> None:
    await store(bus, 1, 2)
    await asyncio.sleep(0.01)
    moment = time.time_ns() // 1_000_000
    await asyncio.sleep(0.01)
    await store(bus, 3)
    new, by_seq, by_time = Reader(), Reader(), Reader()
    await follow(bus, new.take)
    await follow(bus, by_seq.take, start_seq=2)
    await OrderedConsumer(bus.jetstream, STREAM, "attempt.v1.>", by_time.take, start_at_ms=moment).start()
    await store(bus, 4)
    await until(lambda: new.numbers == [4])
    await until(lambda: by_seq.numbers == [2, 3, 4])
    await until(lambda: by_time.numbers == [3, 4])
    assert by_seq.pending[:2] == [1, 0]


async def test_goes_on_over_restarts_without_loss_or_repetition(nats: NatsServer, bus: Bus, connect: Connect) -> None:
    writer = await connect()
    reader, slow = Reader(), Reader()

    async def slowly(message: Incoming) -> None:
        await asyncio.sleep(0.001)
        slow.take(message)

    await follow(bus, reader.take)
    await follow(bus, slowly)
    writing = asyncio.create_task(store(writer, *range(300)))
    for _ in range(2):
        await asyncio.sleep(0.1)
        nats.restart()
    await writing
    await until(lambda: len(reader.numbers) >= 300 and len(slow.numbers) >= 300)
    assert reader.numbers == slow.numbers == list(range(300))


async def test_nothing_that_came_during_the_outage_is_missed_before_any_message_was_seen(
    nats: NatsServer, bus: Bus, connect: Connect
) -> None:
    await store(bus, 1)
    reader = Reader()
    await follow(bus, reader.take)
    nats.stop()
    await until(lambda: not bus.connected)
    nats.start()
    writer = await connect()
    await store(writer, 2)
    await until(lambda: reader.numbers == [2])


async def test_resumes_within_two_seconds_of_a_restart(nats: NatsServer, bus: Bus) -> None:
    reader = Reader()
    await follow(bus, reader.take)
    nats.restart()
    began = time.monotonic()
    await store(bus, 1)
    await until(lambda: reader.numbers == [1])
    print(f"resumed after {time.monotonic() - began:.2f} s")


async def test_a_consumer_that_vanishes_is_made_anew(bus: Bus) -> None:
    reader = Reader()
    await follow(bus, reader.take)
    (consumer,) = await consumers(bus)
    await bus.jetstream.api(f"CONSUMER.DELETE.{STREAM}.{consumer}")
    await store(bus, 1)
    await until(lambda: reader.numbers == [1])


async def test_a_message_lost_among_others_is_noticed_by_the_next_one(bus: Bus) -> None:
    reader = Reader()
    consumer = await follow(bus, reader.take)
    inbox = consumer._inbox
    assert inbox is not None
    takes, number = bus.session._client._direct, inbox._inner._id
    receive = takes[number]

    def lossy(message: Incoming) -> None:
        if message.data != b"2":
            receive(message)

    takes[number] = lossy
    await store(bus, 1, 2, 3)
    await until(lambda: len(reader.numbers) == 3)
    assert reader.numbers == [1, 2, 3]


async def test_a_lost_message_is_noticed_by_the_next_heartbeat(bus: Bus) -> None:
    reader = Reader()
    consumer = await follow(bus, reader.take)
    await store(bus, 1)
    await until(lambda: reader.numbers == [1])
    inbox = consumer._inbox
    assert inbox is not None
    bus.session._client._direct[inbox._inner._id] = lambda message: None  # the next message gets lost on its way
    await store(bus, 2)
    await until(lambda: consumer._inbox is not inbox)
    await store(bus, 3)
    await until(lambda: reader.numbers == [1, 2, 3])


async def test_a_slow_handler_holds_the_server_back_and_keeps_its_consumer(bus: Bus) -> None:
    """A handler that takes longer than the heartbeats is no lost consumer."""
    await asyncio.gather(*(store(bus, number) for number in range(50)))
    reader = Reader()

    async def slow_first(message: Incoming) -> None:
        if not reader.numbers:
            await asyncio.sleep(2)
        reader.take(message)

    consumer = await follow(bus, slow_first, start_seq=1)
    made = consumer._consumer
    await until(lambda: len(reader.numbers) == 50)
    assert consumer._consumer == made


async def test_a_raising_handler_costs_one_message(bus: Bus) -> None:
    reader = Reader()

    def bad(message: Incoming) -> None:
        if message.data == b"2":
            raise RuntimeError("bad")
        reader.take(message)

    await follow(bus, bad)
    await store(bus, 1, 2, 3)
    await until(lambda: reader.numbers == [1, 3])


async def test_a_wiped_store_is_waited_for_and_then_read_from_its_start(nats: NatsServer, bus: Bus) -> None:
    reader = Reader()
    await follow(bus, reader.take)
    await store(bus, 1, 2, 3)
    await until(lambda: reader.numbers == [1, 2, 3])
    nats.wipe()
    await until(lambda: bus.session.reconnects == 1)
    await asyncio.sleep(0.3)
    await topology.ensure(bus)
    await store(bus, 4)
    await until(lambda: reader.numbers == [1, 2, 3, 4])


async def test_without_the_stream_the_first_start_says_so(connect: Connect) -> None:
    bus = await connect()
    with pytest.raises(NotFound, match="stream not found"):
        await follow(bus, lambda message: None)


async def test_leaves_no_consumers_behind(nats: NatsServer, bus: Bus, connect: Connect) -> None:
    """Unsubscribing left the library's ordered consumers on the server, 100 of 100."""
    closing = await connect()
    followers = [await follow(bus, lambda message: None) for _ in range(3)]
    await follow(closing, lambda message: None)
    watch = await closing.kv.watch(topology.KEYS, lambda key, entry: None)
    assert len(await consumers(bus)) == 4
    for each in followers:
        each._break("test")  # made anew
    await until(lambda: all(not each._broken for each in followers))
    await until(lambda: len(bus.session._tasks) == len(bus.session.readers) + 1)
    assert len(await consumers(bus)) == 4
    for each in followers:
        await each.close()
    await closing.close()
    assert await consumers(bus) == []
    assert await consumers(bus, f"KV_{topology.KEYS}") == []
    await watch.close()
