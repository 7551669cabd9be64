"""Core NATS through the adapter: every hazard of the connection, against a real server."""

import asyncio
import contextlib
import socket

import pytest

from contracts.bus import Bus, BusError, Incoming, NoResponder, TooLarge, Unavailable, session
from tests.support.nats_server import Connect, NatsServer, free_port
from tests.support.polling import metric, until
from tests.support.proxy import Link


async def test_a_subscription_is_live_when_subscribe_returns(connect: Connect) -> None:
    """The library's flush is no barrier: 50 of 2000 such first messages were lost after one flush."""
    listener, speaker = await connect(), await connect()
    got: list[bytes] = []
    for number in range(300):
        subscription = await listener.subscribe(f"first.{number}", lambda message: got.append(message.data))
        await speaker.publish(f"first.{number}", b"%d" % number)
        await speaker.session.barrier()
        await listener.session.barrier()
        await subscription.close()
    assert got == [b"%d" % number for number in range(300)]


async def test_many_subscriptions_at_once_are_live(connect: Connect) -> None:
    listener, speaker = await connect(), await connect()
    got: set[int] = set()

    async def first(number: int) -> None:
        await listener.subscribe(f"first.{number}", lambda message: got.add(number))
        await speaker.publish(f"first.{number}", b"")

    await asyncio.gather(*(first(number) for number in range(500)))
    await until(lambda: len(got) == 500)


async def test_a_late_pong_does_not_leave_the_connection_deaf(connect: Connect) -> None:
    """A PONG after a flush's time-out kills the client's read loop while it stays "connected"."""
    bus = await connect()
    got: list[bytes] = []
    await bus.subscribe("a", lambda message: got.append(message.data))
    revived = metric("headrace_bus_dead_loops_total")
    while not bus.session._client._reading_task.done():
        with contextlib.suppress(Exception):
            await bus.session._client.flush(timeout=1e-6)
    assert bus.connected
    await until(lambda: bus.session.reconnects == 1)
    assert metric("headrace_bus_dead_loops_total") == revived + 1
    await bus.publish("a", b"heard")
    await until(lambda: got == [b"heard"])


async def test_a_malformed_message_of_a_stranger_does_not_leave_the_connection_deaf(
    nats: NatsServer, connect: Connect
) -> None:
    bus = await connect()
    got: list[bytes] = []
    await bus.subscribe("a", lambda message: got.append(message.data))
    with socket.create_connection(("127.0.0.1", nats.port)) as stranger:
        stranger.sendall(b'CONNECT {"headers":true,"verbose":false}\r\nHPUB a 8 8\r\nNATS/1.0\r\nPING\r\n')
        await until(lambda: got == [b""])
    await bus.publish("a", b"heard")
    await until(lambda: got == [b"", b"heard"])


async def test_a_reconnect_that_died_is_started_again(nats: NatsServer, connect: Connect) -> None:
    bus = await connect()
    nats.stop()
    await until(lambda: bus.session._client.is_reconnecting)
    bus.session._client._reconnection_task.cancel()
    nats.start()
    await until(lambda: bus.session.reconnects == 1)
    assert bus.connected


async def test_a_clogged_link_is_given_up(link: Link, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library waits for the old socket to take what is buffered, which a half-open link never does."""
    monkeypatch.setattr(session, "PING_INTERVAL_S", 0.3)
    monkeypatch.setattr(session, "FLUSH_TIMEOUT_S", 0.1)
    bus = await connect(link.url)
    link.clog()
    for _ in range(12):
        with contextlib.suppress(Unavailable):
            await bus.publish("a", bytes(1_000_000))
    await until(lambda: bus.session.reconnects == 1)
    got: list[bytes] = []
    await bus.subscribe("b", lambda message: got.append(message.data))
    await bus.publish("b", b"through")
    await until(lambda: got == [b"through"])


@pytest.mark.parametrize("send", ["publish", "request", "store"])
async def test_a_message_over_the_limit_with_its_headers_is_refused(bus: Bus, send: str) -> None:
    """The client counts the payload only; the server then closes the connection for good."""
    data = bytes(bus.session.max_payload - 10)
    sending = {
        "publish": lambda: bus.publish("a", data, headers={"Some-Header": "x" * 100}),
        "request": lambda: bus.request("a", bytes(bus.session.max_payload + 1)),
        "store": lambda: bus.jetstream.store("attempt.v1.m.r.1", data, msg_id="r.1"),
    }
    with pytest.raises(TooLarge):
        await sending[send]()
    await bus.session.barrier()
    assert bus.connected and bus.session.reconnects == 0


async def test_the_size_limit_is_the_servers_to_the_byte(connect: Connect) -> None:
    bus = await connect()
    got: list[int] = []
    await bus.subscribe("a", lambda message: got.append(len(message.data)))
    overhead = len(b"NATS/1.0\r\nK: v\xc3\xa9\r\n\r\n")
    await bus.publish("a", bytes(bus.session.max_payload - overhead), headers={"K": "vé"})
    with pytest.raises(TooLarge):
        await bus.publish("a", bytes(bus.session.max_payload - overhead + 1), headers={"K": "vé"})
    await bus.publish("a", bytes(bus.session.max_payload))
    with pytest.raises(TooLarge):
        await bus.publish("a", bytes(bus.session.max_payload + 1))
    await until(lambda: len(got) == 2)
    assert bus.session.reconnects == 0


async def test_a_subject_over_the_servers_limit_is_refused(connect: Connect) -> None:
    bus = await connect()
    with pytest.raises(TooLarge):
        await bus.publish("a." * 2000 + "a", b"")
    with pytest.raises(TooLarge):
        await bus.subscribe("a." * 2000 + "a", lambda message: None)
    await bus.publish("a." * 1000 + "a", b"")
    await bus.session.barrier()
    assert bus.session.reconnects == 0


@pytest.mark.parametrize("error", [RuntimeError("bad"), asyncio.CancelledError()])
@pytest.mark.parametrize("how", ["plain", "awaited", "concurrent"])
async def test_a_raising_handler_costs_one_message(connect: Connect, error: BaseException, how: str) -> None:
    """A CancelledError silently ended the library's subscription."""
    bus = await connect()
    got: list[bytes] = []

    def plain(message: Incoming) -> None:
        if message.data == b"bad":
            raise error
        got.append(message.data)

    async def awaited(message: Incoming) -> None:
        await asyncio.sleep(0)
        plain(message)

    failed = metric("headrace_bus_handler_errors_total")
    await bus.subscribe("a", plain if how == "plain" else awaited, concurrent=how == "concurrent")
    for data in (b"1", b"bad", b"2"):
        await bus.publish("a", data)
    await until(lambda: got == [b"1", b"2"])
    assert metric("headrace_bus_handler_errors_total") == failed + 1
    assert bus.session.reconnects == 0


async def test_awaited_handlers_keep_the_order_and_concurrent_ones_are_bounded(connect: Connect) -> None:
    bus = await connect()
    done: list[int] = []
    running = peak = 0

    async def slow_first(message: Incoming) -> None:
        await asyncio.sleep(0.02 if message.data == b"0" else 0)
        done.append(int(message.data))

    async def count(message: Incoming) -> None:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.01)
        running -= 1

    await bus.subscribe("a", slow_first)
    counting = await bus.subscribe("a", count, concurrent=True, limit=4)
    for number in range(20):
        await bus.publish("a", b"%d" % number)
    await until(lambda: done == list(range(20)))
    await until(lambda: peak == 4 and running == 0)
    await counting.close()


async def test_a_slow_consumer_is_counted_and_the_connection_survives(connect: Connect) -> None:
    """Over its limit the client drops message by message; an error callback that raises would deafen it."""
    bus, speaker = await connect(), await connect()
    go_on = asyncio.Event()
    got = 0

    async def slow(message: Incoming) -> None:
        nonlocal got
        await go_on.wait()
        got += 1

    dropped = metric("headrace_bus_slow_consumer_drops_total")
    subscription = await bus.subscribe("a", slow)
    subscription._inner._pending_bytes_limit = 1_000_000  # 128 MiB otherwise
    other: list[bytes] = []
    await bus.subscribe("b", lambda message: other.append(message.data))
    for _ in range(30):
        await speaker.publish("a", bytes(100_000))
    await speaker.publish("b", b"fine")
    await until(lambda: other == [b"fine"])
    assert subscription.dropped > 0
    assert metric("headrace_bus_slow_consumer_drops_total") == dropped + subscription.dropped
    go_on.set()
    await until(lambda: got == 30 - subscription.dropped)
    await speaker.publish("a", b"")
    await until(lambda: got == 31 - subscription.dropped)
    assert bus.session.reconnects == 0 and bus.connected


async def test_requests_end_in_an_answer_or_unavailable(nats: NatsServer, connect: Connect) -> None:
    bus = await connect()

    async def answer(message: Incoming) -> None:
        message.respond(message.data + b"!")

    await bus.subscribe("echo", answer)
    await bus.subscribe("deaf", lambda message: None)
    assert await bus.request("echo", b"hi") == b"hi!"
    with pytest.raises(NoResponder):
        await bus.request("nobody", b"")
    with pytest.raises(Unavailable):
        await bus.request("deaf", b"", timeout_s=0.05)
    nats.freeze()
    with pytest.raises(Unavailable):
        await bus.request("echo", b"", timeout_s=0.05)
    nats.thaw()
    assert await bus.request("echo", b"later") == b"later!"


@pytest.mark.parametrize("how", ["cut", "closed"])
async def test_a_request_ends_with_the_connection_that_its_answer_would_come_by(
    how: str, nats: NatsServer, connect: Connect
) -> None:
    bus, other = await connect(), await connect()
    heard = asyncio.Event()
    await other.subscribe("deaf", lambda message: heard.set())
    asking = asyncio.create_task(bus.request("deaf", b"", timeout_s=60))
    await heard.wait()
    if how == "cut":
        nats.restart()
    else:
        await bus.close()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(asking, 10)


async def test_a_reply_subject_cannot_make_us_publish_anywhere(bus: Bus) -> None:
    """A responder publishes wherever the asker's reply says, even into a stream."""
    refused = metric("headrace_bus_replies_refused_total")

    async def answer(message: Incoming) -> None:
        message.respond(b"{}")

    await bus.subscribe("echo", answer)
    await bus.session._client.publish("echo", b"", reply="attempt.v1.m.forged.1")
    await until(lambda: metric("headrace_bus_replies_refused_total") == refused + 1)
    await bus.session.barrier()
    assert await bus.jetstream.last("ATTEMPTS", "attempt.v1.m.forged.1") is None


async def test_subscriptions_go_on_after_a_restart_of_the_server(nats: NatsServer, connect: Connect) -> None:
    bus, speaker = await connect(), await connect()
    reconnects = metric("headrace_bus_reconnects_total")
    got: list[bytes] = []
    await bus.subscribe("a", lambda message: got.append(message.data))
    nats.restart()
    await until(lambda: bus.session.reconnects == 1 and speaker.session.reconnects == 1)
    assert metric("headrace_bus_reconnects_total") == reconnects + 2
    await bus.session.barrier()
    await speaker.publish("a", b"again")
    await until(lambda: got == [b"again"])


async def test_subscribing_while_the_server_is_away_waits_for_it(nats: NatsServer, connect: Connect) -> None:
    bus = await connect()
    got: list[bytes] = []
    nats.stop()
    await until(lambda: not bus.connected)
    subscribing = asyncio.create_task(bus.subscribe("a", lambda message: got.append(message.data)))
    await asyncio.sleep(0.1)
    assert not subscribing.done()
    nats.start()
    await subscribing
    speaker = await connect()
    await speaker.publish("a", b"heard")
    await until(lambda: got == [b"heard"])


@pytest.mark.parametrize("send", ["publish", "request"])
async def test_nothing_is_sent_later_that_was_asked_for_while_disconnected(
    send: str, nats: NatsServer, connect: Connect
) -> None:
    """Who was told that it failed may do something else; what is sent after that would happen as well."""
    bus = await connect()
    got: list[bytes] = []
    await bus.subscribe("a", lambda message: got.append(message.data))
    nats.stop()
    await until(lambda: not bus.connected)
    began = bus.session._client.stats["out_msgs"]
    with pytest.raises(Unavailable, match="disconnected"):
        await getattr(bus, send)("a", b"in vain")
    assert bus.session._client.stats["out_msgs"] == began
    nats.start()
    await until(lambda: bus.connected)
    await bus.publish("a", b"heard")
    await until(lambda: got)
    assert got == [b"heard"]


async def test_what_a_lost_connection_had_yet_to_send_is_not_sent_by_the_next_one(link: Link, connect: Connect) -> None:
    bus, listener = await connect(link.url), await connect()
    got: list[bytes] = []
    await listener.subscribe("a", lambda message: got.append(message.data))
    link.stall()
    client = bus.session._client
    while not client._transport._io_writer.transport.get_write_buffer_size():
        await bus.publish("b", bytes(1_000_000))
        await asyncio.sleep(0)
    asking = asyncio.create_task(bus.request("a", b"in vain", timeout_s=60))
    await until(lambda: client.pending_data_size > 0)  # The socket takes no more.
    link.cut()
    with pytest.raises(Unavailable):
        await asking
    link.heal()
    await until(lambda: bus.session.reconnects)
    await bus.session.barrier()
    await bus.publish("a", b"heard")
    await until(lambda: got)
    assert [len(data) for data in got] == [5]


async def test_no_server_is_an_error_within_the_time_limit() -> None:
    with pytest.raises(Unavailable):
        await Bus.connect(f"nats://127.0.0.1:{free_port()}", name="test", timeout_s=0.5)


async def test_being_refused_for_good_sets_closed(nats: NatsServer, connect: Connect) -> None:
    """Any protocol error closes the library's client for good; the service must then exit."""
    bus = await connect()
    bus.session._client._transport.write(b"NONSENSE\r\n")
    await asyncio.wait_for(bus.closed.wait(), 5)
    with pytest.raises(Unavailable):
        await bus.publish("a", b"")
    with pytest.raises(BusError):
        await bus.request("a", b"")


async def test_closing_ourselves_is_no_loss_and_hands_on_what_arrived(connect: Connect) -> None:
    bus, speaker = await connect(), await connect()
    got: list[bytes] = []

    async def slowly(message: Incoming) -> None:
        await asyncio.sleep(0.01)
        got.append(message.data)

    await bus.subscribe("a", slowly)
    for number in range(10):
        await speaker.publish("a", b"%d" % number)
    await speaker.session.barrier()
    await bus.session.barrier()
    await bus.close()
    assert len(got) == 10
    assert not bus.closed.is_set()


async def test_closing_ends_while_the_server_is_frozen_or_away(nats: NatsServer, connect: Connect) -> None:
    frozen, away = await connect(), await connect()
    nats.freeze()
    await asyncio.wait_for(frozen.close(), 15)
    nats.thaw()
    nats.stop()
    await asyncio.wait_for(away.close(), 15)
