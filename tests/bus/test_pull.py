"""Taking work: never more than there is credit, nothing lost over restarts, deletions and wiped stores."""

import asyncio
import json
import time
from collections.abc import Callable

import pytest

from contracts import topology
from contracts.bus import BatchConsumer, Bus, Incoming, NotFound, PullConsumer, Unavailable
from contracts.bus.pull import PULL_EXPIRES_ALONE_S, PULL_EXPIRES_S, consumer_name
from tests.support.nats_server import Connect, NatsServer
from tests.support.polling import metric, until

SUBJECT = "work.v1.m.v.w1"


async def publish(bus: Bus, *numbers: int) -> None:
    for number in numbers:
        await bus.jetstream.store(SUBJECT, b"%d" % number, msg_id=f"{time.time_ns()}-{number}", timeout_s=20)


class Worker:
    """Takes what it is given into slots, and frees them by ``finish``."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.running: list[Incoming] = []
        self.taken: list[int] = []
        self.most = 0

    def credit(self) -> int:
        return self.slots - len(self.running)

    def take(self, message: Incoming) -> None:
        self.taken.append(int(message.data))
        self.running.append(message)
        self.most = max(self.most, len(self.running))

    async def finish(self, puller: PullConsumer) -> None:
        assert await self.running[0].ack()
        self.running.pop(0)
        puller.notify()

    async def start(self, bus: Bus, *, recreate: bool = False, ack_wait_s: float = 60) -> PullConsumer:
        return await PullConsumer(
            bus.jetstream,
            topology.WORK,
            "w-1",
            SUBJECT,
            self.take,
            ack_wait_s=ack_wait_s,
            credit=self.credit,
            recreate=recreate,
        ).start()


async def waiting_pulls(bus: Bus) -> int:
    return int((await bus.jetstream.api(f"CONSUMER.INFO.{topology.WORK}.w-1"))["num_waiting"])


async def settled(condition: Callable[[], object]) -> None:
    """The condition holds and goes on to hold for a while."""
    await until(condition)
    await asyncio.sleep(0.1)
    assert condition()


async def test_never_asks_for_more_than_there_is_credit(bus: Bus) -> None:
    worker = Worker(3)
    await publish(bus, *range(10))
    puller = await worker.start(bus)
    await settled(lambda: worker.taken == [0, 1, 2])
    worker.slots = 5
    puller.notify()
    await settled(lambda: worker.taken == [0, 1, 2, 3, 4])
    while len(worker.taken) < 10 or worker.running:
        await worker.finish(puller)
        await asyncio.sleep(0.01)
    assert worker.taken == list(range(10))
    assert worker.most == 5
    assert [m async for m in bus.jetstream.read(topology.WORK, ">")] == []


async def test_credit_holds_over_many_expiries_and_small_pulls(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pull requests expire with a word of how much they still lacked; the sum of what is asked stays right."""
    monkeypatch.setattr("contracts.bus.pull.PULL_EXPIRES_ALONE_S", 0.1)
    worker = Worker(0)
    puller = await worker.start(bus)
    for slots in range(1, 9):
        worker.slots = slots
        puller.notify()
        await asyncio.sleep(0.07)
    await publish(bus, *range(5))
    await settled(lambda: worker.taken == list(range(5)))
    await asyncio.sleep(0.3)
    await until(lambda: 2 <= puller._asked_total <= 3)
    await publish(bus, *range(5, 20))
    await settled(lambda: worker.taken == list(range(8)))
    assert worker.most == 8
    assert puller._asked_total == 0


async def test_an_awaited_handler_counts_as_in_hand(bus: Bus) -> None:
    running = most = 0
    done: list[int] = []
    await publish(bus, *range(6))

    async def work(message: Incoming) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        assert await message.ack()
        running -= 1
        done.append(int(message.data))

    await PullConsumer(bus.jetstream, topology.WORK, "w-1", SUBJECT, work, ack_wait_s=60, credit=lambda: 2).start()
    await until(lambda: done == list(range(6)))
    assert most == 1


async def test_a_raising_handler_or_credit_stops_nothing(bus: Bus) -> None:
    taken: list[int] = []
    calls = 0

    def bad_handler(message: Incoming) -> None:
        if message.data == b"1":
            raise RuntimeError("bad")
        taken.append(int(message.data))

    def bad_credit() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise RuntimeError("bad")
        return 10

    puller = await PullConsumer(
        bus.jetstream, topology.WORK, "w-1", SUBJECT, bad_handler, ack_wait_s=60, credit=bad_credit
    ).start()
    await publish(bus, 0, 1, 2)
    puller.notify()
    await until(lambda: taken == [0, 2])


@pytest.mark.parametrize("recreate", [False, True])
async def test_goes_on_within_two_seconds_of_a_restart(nats: NatsServer, bus: Bus, recreate: bool) -> None:
    worker = Worker(10)
    await worker.start(bus, recreate=recreate)
    await publish(bus, 0)
    await until(lambda: worker.taken == [0])
    resumes = metric("headrace_bus_consumer_resumes_total", kind="pull")
    nats.restart()
    began = time.monotonic()
    await publish(bus, 1)
    await until(lambda: 1 in worker.taken)
    print(f"went on after {time.monotonic() - began:.2f} s")
    assert set(worker.taken) == {0, 1}
    assert not recreate or metric("headrace_bus_consumer_resumes_total", kind="pull") > resumes


async def test_a_message_sent_into_a_cut_comes_again_after_the_reconnect(bus: Bus, connect: Connect) -> None:
    """It would wait for an ack_wait that is longer than any deadline."""
    taking = await connect()
    worker = Worker(10)
    puller = await worker.start(taking, recreate=True, ack_wait_s=3600)
    subscription = puller._subscription
    assert subscription is not None
    takes, number = taking.session._client._direct, subscription._inner._id
    receive = takes[number]
    lost: list[bytes] = []
    takes[number] = lambda message: lost.append(message.data)
    await publish(bus, 0)
    await until(lambda: b"0" in lost)
    takes[number] = receive
    await taking.session._client.force_reconnect()
    await until(lambda: worker.taken == [0])


async def test_everything_is_taken_through_kills(nats: NatsServer, bus: Bus, connect: Connect) -> None:
    """Made anew after each reconnect, so that nothing waits for an ack_wait of hours; the handler knows what
    it has.
    """
    writer = await connect()
    done: set[int] = set()

    async def work(message: Incoming) -> None:
        done.add(int(message.data))
        await message.ack()

    await PullConsumer(
        bus.jetstream, topology.WORK, "w-1", SUBJECT, work, ack_wait_s=3600, credit=lambda: 8, recreate=True
    ).start()
    writing = asyncio.create_task(publish(writer, *range(200)))
    for _ in range(3):
        await asyncio.sleep(0.1)
        nats.restart()
    await writing
    await until(lambda: done == set(range(200)), limit_s=30)


async def test_a_consumer_deleted_under_a_pull_is_made_anew_at_once(bus: Bus) -> None:
    """The library's fetch hides the deletion: one waits to its time-out, several are answered by nothing."""
    worker = Worker(10)
    await worker.start(bus)
    await publish(bus, 0)
    await until(lambda: worker.taken == [0])
    await bus.jetstream.api(f"CONSUMER.DELETE.{topology.WORK}.w-1")
    await publish(bus, 1)
    # The first comes again or not: a consumer of the same name that is made this soon may get the deleted one's state.
    await until(lambda: 1 in worker.taken, limit_s=PULL_EXPIRES_ALONE_S * 0.2)


async def test_a_missing_consumer_shows_at_the_next_pull(bus: Bus) -> None:
    worker = Worker(0)
    puller = await worker.start(bus)
    await bus.jetstream.api(f"CONSUMER.DELETE.{topology.WORK}.w-1")
    await publish(bus, 0)
    worker.slots = 1
    puller.notify()
    await until(lambda: worker.taken == [0])


async def test_recreate_brings_all_unacknowledged_messages_again(bus: Bus) -> None:
    first, second = Worker(10), Worker(10)
    puller = await first.start(bus)
    await publish(bus, 0, 1, 2)
    await until(lambda: first.taken == [0, 1, 2])
    await first.finish(puller)
    await puller.close()
    await second.start(bus, recreate=True)
    await until(lambda: second.taken == [1, 2])


async def test_who_has_no_credit_leaves_the_consumer_to_who_took_it(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contracts.bus.pull.PULL_EXPIRES_ALONE_S", PULL_EXPIRES_S)
    first, second = Worker(10), Worker(10)
    await first.start(bus, recreate=True)
    await publish(bus, 0)
    await until(lambda: first.taken == [0])
    first.slots = 0
    await second.start(bus, recreate=True)
    await until(lambda: second.taken == [0])
    resumes = metric("headrace_bus_consumer_resumes_total", kind="pull")
    await asyncio.sleep(2 * PULL_EXPIRES_S)
    await publish(bus, 1)
    await until(lambda: second.taken == [0, 1])
    assert metric("headrace_bus_consumer_resumes_total", kind="pull") == resumes and first.taken == [0]


async def test_an_ack_of_an_old_delivery_settles_after_the_consumer_was_made_anew(bus: Bus) -> None:
    first, second = Worker(10), Worker(10)
    old = await first.start(bus)
    await publish(bus, 0)
    await until(lambda: first.taken == [0])
    await old.close()
    await second.start(bus, recreate=True)
    await until(lambda: second.taken == [0])
    assert await first.running[0].ack()
    assert [m async for m in bus.jetstream.read(topology.WORK, ">")] == []


async def test_closing_withdraws_what_was_asked_for(bus: Bus) -> None:
    """A pull that outlives its asker takes a message with it until ack_wait."""
    first, second = Worker(10), Worker(10)
    puller = await first.start(bus)
    await publish(bus, 0)
    await until(lambda: first.taken == [0])
    assert await waiting_pulls(bus) >= 1
    await puller.close()
    await publish(bus, 1)
    await second.start(bus)
    await settled(lambda: second.taken == [1])
    assert first.taken == [0]


async def test_a_wiped_store_is_waited_for(nats: NatsServer, bus: Bus) -> None:
    worker = Worker(10)
    await worker.start(bus)
    await publish(bus, 0)
    await until(lambda: worker.taken == [0])
    nats.wipe()
    await until(lambda: bus.session.reconnects == 1)
    await asyncio.sleep(0.3)
    await topology.ensure(bus)
    await publish(bus, 1)
    await until(lambda: worker.taken == [0, 1])


async def test_without_the_stream_the_first_start_says_so(connect: Connect) -> None:
    bus = await connect()
    with pytest.raises(NotFound, match="stream not found"):
        await Worker(1).start(bus)
    with pytest.raises(NotFound, match="stream not found"):
        await Worker(1).start(bus, recreate=True)


async def test_an_unused_consumer_goes_and_a_used_one_stays(bus: Bus) -> None:
    puller = await PullConsumer(
        bus.jetstream,
        topology.WORK,
        "w-1",
        SUBJECT,
        lambda message: None,
        ack_wait_s=60,
        credit=lambda: 1,
        inactive_s=3,
    ).start()
    info = await bus.jetstream.api(f"CONSUMER.INFO.{topology.WORK}.w-1")
    assert info["config"]["inactive_threshold"] == 3_000_000_000
    assert info["config"]["max_ack_pending"] == -1
    await puller.close()


def test_pulls_are_renewed_more_often_than_a_lost_one_may_cost() -> None:
    assert PULL_EXPIRES_S <= 2 and PULL_EXPIRES_ALONE_S <= 15


def test_names_that_the_server_would_not_take_are_cut() -> None:
    assert consumer_name("w-1") == "w-1"
    long, other = consumer_name("m" * 400), consumer_name("m" * 401)
    assert len(long) == len(other) == 200
    assert long != other


async def test_batches_are_gathered_by_number_and_by_time(bus: Bus) -> None:
    batches: list[list[int]] = []

    async def write(messages: list[Incoming]) -> None:
        batches.append([json.loads(message.data) for message in messages])
        assert all(await asyncio.gather(*(message.ack() for message in messages)))

    await publish(bus, *range(7))
    await BatchConsumer(
        bus.jetstream, topology.WORK, "ledger", "work.v1.>", write, batch=5, max_wait_s=0.2, ack_wait_s=10
    ).start()
    await until(lambda: batches == [[0, 1, 2, 3, 4], [5, 6]])
    await publish(bus, 7)
    await until(lambda: batches[2:] == [[7]])


async def test_what_never_ends_is_handed_over_in_few_batches(bus: Bus) -> None:
    batches: list[list[int]] = []

    async def write(messages: list[Incoming]) -> None:
        batches.append([json.loads(message.data) for message in messages])
        assert all(await asyncio.gather(*(message.ack() for message in messages)))

    await BatchConsumer(
        bus.jetstream,
        topology.WORK,
        "ledger",
        "work.v1.>",
        write,
        batch=6,
        max_wait_s=0.01,
        ack_wait_s=60,
        every_s=30.0,
    ).start()
    await publish(bus, 0)
    await until(lambda: batches == [[0]])
    for number in range(1, 7):
        await publish(bus, number)
        await asyncio.sleep(0.05)
    await until(lambda: batches == [[0], [1, 2, 3, 4, 5, 6]])


async def test_a_batch_that_failed_comes_again_and_nothing_is_asked_for_meanwhile(bus: Bus) -> None:
    sizes: list[int] = []
    acked = 0

    async def write(messages: list[Incoming]) -> None:
        nonlocal acked
        sizes.append(len(messages))
        if len(sizes) == 1:
            raise RuntimeError("down")
        acked += sum(await asyncio.gather(*(message.ack() for message in messages)))

    await publish(bus, 0, 1)
    await BatchConsumer(
        bus.jetstream, topology.WORK, "ledger", "work.v1.>", write, batch=2, max_wait_s=0.1, ack_wait_s=1
    ).start()
    await until(lambda: acked >= 2)
    assert sizes[0] == 2
    assert [m async for m in bus.jetstream.read(topology.WORK, ">")] == []


async def test_batches_go_on_after_a_restart_and_end_with_the_connection(
    nats: NatsServer, bus: Bus, connect: Connect
) -> None:
    closing = await connect()
    begun: set[int] = set()
    written: set[int] = set()

    async def write(messages: list[Incoming]) -> None:
        begun.update(int(m.data) for m in messages)
        await asyncio.sleep(0.05)
        acked = await asyncio.gather(*(message.ack() for message in messages))
        written.update(int(m.data) for m, ok in zip(messages, acked, strict=True) if ok)

    await BatchConsumer(
        closing.jetstream, topology.WORK, "ledger", "work.v1.>", write, batch=10, max_wait_s=0.05, ack_wait_s=2
    ).start()
    await publish(bus, 0)
    await until(lambda: written == {0})
    nats.restart()
    await publish(bus, *range(1, 20))
    await until(lambda: written == set(range(20)))
    await publish(bus, 20)
    await until(lambda: 20 in begun)
    await closing.close()
    assert 20 in written


async def held(bus: Bus, count: int) -> list[Incoming]:
    """So many messages of WORK that wait for their acks."""
    worker = Worker(count)
    await publish(bus, *range(count))
    await worker.start(bus, ack_wait_s=3600)
    await until(lambda: len(worker.running) == count)
    return worker.running


@pytest.mark.parametrize("answered", [True, False])
async def test_acks_that_go_together_are_confirmed_by_one_answer_or_each_by_its_own(
    bus: Bus, monkeypatch: pytest.MonkeyPatch, answered: bool
) -> None:
    messages = await held(bus, 20)
    ask, asked = bus.session.ask, list[str]()

    async def counting(subject: str, data: bytes, timeout_s: float) -> Incoming:
        asked.append(subject)
        if not answered and len(asked) == 1:
            raise Unavailable("the word on all of them is lost")
        return await ask(subject, data, timeout_s)

    monkeypatch.setattr(bus.session, "ask", counting)
    assert await asyncio.gather(*(message.ack() for message in messages)) == [True] * 20
    assert len(asked) == (1 if answered else 21)
    monkeypatch.undo()
    info = await bus.jetstream.api(f"CONSUMER.INFO.{topology.WORK}.w-1")
    assert info["num_ack_pending"] == 0
    assert (await bus.jetstream.api(f"STREAM.INFO.{topology.WORK}"))["state"]["messages"] == 0


async def test_acks_of_a_consumer_that_is_gone_stay_unconfirmed(bus: Bus) -> None:
    messages = await held(bus, 3)
    await bus.jetstream.delete_consumer(topology.WORK, "w-1")
    assert await asyncio.gather(*(message.ack() for message in messages)) == [False] * 3
