"""The subscriber against a real server, with a scripted worker and scheduler: repair, cancels, heartbeats, ends."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from contracts import subjects
from contracts.bus import Bus, Incoming
from contracts.messages.admission import DEADLINE_MS_MAX
from contracts.messages.control import CancelAnswer, CancelRequest, StatusAnswer, StatusRequest, StreamOwnerHeartbeat
from contracts.messages.frames import EndData, ErrorData, Frame, FrameKind, FramesAnswer, FramesRequest, ReplyMessage
from contracts.streaming import subscriber as module
from contracts.streaming.relay import Effects, Relay, RelaySettings
from contracts.streaming.subscriber import RelayedStream, Subscriber
from tests.support.nats_server import Connect, NatsServer
from tests.support.polling import metric, until

TENANT, MODEL, WORKER = "te.nant", "smol", "w-1"
OWNER = subjects.tenant_stream_owner(TENANT, "c-1")
REPLY_INBOX = subjects.tenant_reply_prefix(TENANT) + "c-1"
END = EndData(outcome="completed", finish_reason="stop", prompt_tokens=5, completion_tokens=3)

encode = msgspec.json.encode
decode = msgspec.json.decode


class WatchedRelay(Relay):
    """Notes the answers that it is given."""

    def __init__(self, settings: RelaySettings) -> None:
        super().__init__(stream=True, now_ms=int(time.monotonic() * 1000), settings=settings)
        self.answers: list[FramesAnswer | None] = []

    def on_frames_answer(self, worker: str, attempt: int, answer: FramesAnswer | None, now_ms: int) -> Effects:
        self.answers.append(answer)
        return super().on_frames_answer(worker, attempt, answer, now_ms)


class Stream(RelayedStream):
    """Keeps what reaches it. Reads at most ``room`` chunks."""

    relay: WatchedRelay

    def __init__(self, name: str, request_id: str, settings: RelaySettings, room: int = 1000) -> None:
        super().__init__(name=name, request_id=request_id, model=MODEL, tenant=TENANT, relay=WatchedRelay(settings))
        self.room = room
        self.texts: list[str] = []
        self.ends: list[EndData | ErrorData] = []
        self.ticks = 0

    def on_chunk(self, data: msgspec.Raw | bytes, now: float) -> bool:
        if len(self.texts) == self.room:
            return False
        self.texts.append(decode(data))
        return True

    def on_end(self, end: EndData) -> None:
        self.ends.append(end)

    def on_error(self, error: ErrorData) -> None:
        self.ends.append(error)

    def on_tick(self, now: float) -> None:
        self.ticks += 1


class Peer:
    """Worker and scheduler: sends frames, keeps them all, and answers as it is told."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.kept: dict[str, list[Frame]] = {}
        self.asked: list[FramesRequest] = []
        self.asked_status: list[StatusRequest] = []
        self.status = StatusAnswer(state="running", attempt=1, worker=WORKER)
        self.may_answer = asyncio.Event()
        """While clear, questions about frames wait."""
        self.may_answer.set()
        self.waiting = 0
        self.cancelled: list[CancelRequest] = []
        self.cancel_answers: list[bytes] = []
        """What is answered to cancels first; afterwards each is durable."""
        self.beats: list[StreamOwnerHeartbeat] = []

    async def start(self) -> None:
        await self.bus.subscribe(subjects.frames(WORKER, TENANT), self._on_frames, concurrent=True)
        await self.bus.subscribe(subjects.status(MODEL, TENANT), self._on_status)
        await self.bus.subscribe(subjects.cancel(MODEL, TENANT), self._on_cancel)
        await self.bus.subscribe(subjects.stream_owner_heartbeat(OWNER), self._on_beat)

    async def _on_frames(self, message: Incoming) -> None:
        request = decode(message.data, type=FramesRequest)
        self.asked.append(request)
        self.waiting += 1
        await self.may_answer.wait()
        self.waiting -= 1
        kept = self.kept[request.request_id]
        message.respond(encode(FramesAnswer(known=True, frames=kept[request.from_seq :])))

    async def _on_status(self, message: Incoming) -> None:
        self.asked_status.append(decode(message.data, type=StatusRequest))
        message.respond(encode(self.status))

    async def _on_cancel(self, message: Incoming) -> None:
        self.cancelled.append(decode(message.data, type=CancelRequest))
        answer = self.cancel_answers.pop(0) if self.cancel_answers else encode(CancelAnswer(durable=True))
        message.respond(answer)

    def _on_beat(self, message: Incoming) -> None:
        self.beats.append(decode(message.data, type=StreamOwnerHeartbeat))

    async def send(self, stream: Stream, *contents: str | EndData | ErrorData, lose: tuple[int, ...] = ()) -> None:
        """The stream's next frames in one message, but for those numbers that get lost."""
        frames = [self.keep(stream, content) for content in contents]
        await self.publish(*[frame for frame in frames if frame.seq not in lose])

    def keep(self, stream: Stream, content: str | EndData | ErrorData) -> Frame:
        kind: FrameKind = "chunk" if isinstance(content, str) else "end" if isinstance(content, EndData) else "error"
        kept = self.kept.setdefault(stream.request_id, [])
        kept.append(Frame(stream=stream.name, attempt=1, seq=len(kept), kind=kind, data=msgspec.Raw(encode(content))))
        return kept[-1]

    async def publish(self, *frames: Frame) -> None:
        await self.bus.publish(REPLY_INBOX, encode(ReplyMessage(worker=WORKER, frames=list(frames))))


@pytest.fixture
async def peer(connect: Connect) -> Peer:
    peer = Peer(await connect(name="peer"))
    await peer.start()
    return peer


@pytest.fixture
async def subscriber(connect: Connect, peer: Peer) -> AsyncIterator[Subscriber]:
    subscriber = Subscriber(await connect(name="owner"), reply_inbox=REPLY_INBOX, stream_owner=OWNER)
    await subscriber.start()
    yield subscriber
    await subscriber.close()


def opened(subscriber: Subscriber, name: str = "s", room: int = 1000, **settings: Any) -> Stream:
    stream = Stream(name, f"r-{name}", RelaySettings(**settings), room)
    subscriber.open(stream)
    return stream


# Frames ----------------------------------------------------------------------------------------------------


async def test_a_message_is_shared_by_streams_and_each_gets_its_own(subscriber: Subscriber, peer: Peer) -> None:
    a, b, left = (opened(subscriber, name) for name in "abc")
    subscriber.leave(left)
    assert len(subscriber) == 2
    escaped = metric("headrace_bus_handler_errors_total")
    await peer.bus.publish(REPLY_INBOX, b"no message")
    await peer.publish(*[peer.keep(stream, stream.name * 2) for stream in (left, b, a, b)])
    await peer.publish(*[peer.keep(stream, END) for stream in (left, b, a)])
    await until(lambda: a.ends and b.ends)
    assert (a.texts, b.texts, left.texts) == (["aa"], ["bb", "bb"], [])
    assert (a.ends, b.ends, left.ends) == ([END], [END], [])
    assert not peer.asked and not peer.cancelled
    assert metric("headrace_bus_handler_errors_total") == escaped


async def test_a_missed_frame_is_asked_for_and_repaired(subscriber: Subscriber, peer: Peer) -> None:
    stream = opened(subscriber)
    repairs = metric("headrace_stream_repairs_total", kind="frames")
    await peer.send(stream, "0", "1", "2", "3", END, lose=(1, 2))
    await until(lambda: stream.ends)
    assert (stream.texts, stream.ends) == (["0", "1", "2", "3"], [END])
    assert peer.asked == [FramesRequest(request_id="r-s", attempt=1, from_seq=1)]
    assert metric("headrace_stream_repairs_total", kind="frames") == repairs + 1


async def test_a_silent_stream_is_asked_about_and_its_lost_tail_repaired(subscriber: Subscriber, peer: Peer) -> None:
    peer.status = StatusAnswer(state="ended", attempt=1, worker=WORKER, outcome="completed", last_seq=2)
    stream = opened(subscriber, silence_ms=300)
    await peer.send(stream, "0", "1", END, lose=(1, 2))
    await until(lambda: stream.ends)
    assert (stream.texts, stream.ends) == (["0", "1"], [END])
    assert peer.asked_status == [StatusRequest(request_id="r-s", void_below=1)]


async def test_nothing_is_asked_about_a_request_without_an_id(subscriber: Subscriber, peer: Peer) -> None:
    """Frames may come before a client knows what its request is called; then it asks."""
    stream = opened(subscriber, silence_ms=0)
    stream.request_id = ""
    await peer.send(stream, "0", "1", END, lose=(0,))
    await until(lambda: stream.ticks >= 2)
    assert not peer.asked and not peer.asked_status
    assert stream.relay.answers == [None]
    stream.request_id, peer.kept["r-s"] = "r-s", peer.kept[""]
    await until(lambda: stream.ends)
    assert (stream.texts, stream.ends) == (["0", "1"], [END])


async def test_other_work_has_its_turn_between_the_ticks_of_many_streams(
    subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it leaves meanwhile is not ticked any more."""
    monkeypatch.setattr(module, "TICKED_AT_ONCE", 2)
    streams = [opened(subscriber, name) for name in "abcde"]
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(streams[1], "on_tick", lambda now: loop.call_soon(subscriber.leave, streams[2]))
    await until(lambda: streams[4].ticks >= 2)
    assert [stream.ticks for stream in streams[2:4]] == [0, streams[4].ticks]


async def test_questions_are_bounded_and_all_are_answered(
    connect: Connect, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUESTIONS_MAX", 3)
    subscriber = Subscriber(await connect(), reply_inbox=REPLY_INBOX, stream_owner=OWNER)
    await subscriber.start()
    peer.may_answer.clear()
    streams = [opened(subscriber, f"s{number}") for number in range(10)]
    for stream in streams:
        await peer.send(stream, "0", "1", END, lose=(0,))
    await until(lambda: peer.waiting == 3)
    await asyncio.sleep(0.2)
    assert peer.waiting == 3
    peer.may_answer.set()
    await until(lambda: all(stream.ends == [END] for stream in streams))
    await subscriber.close()


async def test_an_answer_that_comes_after_the_stream_was_left_changes_nothing(
    subscriber: Subscriber, peer: Peer
) -> None:
    peer.may_answer.clear()
    stream = opened(subscriber)
    await peer.send(stream, "0", "1", END, lose=(0,))
    await until(lambda: peer.waiting)
    subscriber.leave(stream)
    peer.may_answer.set()
    after = opened(subscriber, "after")
    await peer.send(after, "0", END, lose=(0,))
    await until(lambda: after.ends)
    assert not stream.texts and not stream.ends and not stream.relay.answers


async def test_a_question_in_flight_when_the_bus_goes_away_ends_and_is_put_again(
    subscriber: Subscriber, peer: Peer, nats: NatsServer
) -> None:
    peer.may_answer.clear()
    stream = opened(subscriber)
    await peer.send(stream, "0", "1", END, lose=(0,))
    await until(lambda: peer.waiting)
    nats.stop()
    await until(lambda: stream.relay.answers, limit_s=module.QUESTION_TIMEOUT_S / 2)
    assert stream.relay.answers[0] is None
    # While the bus is away an answer cannot come, and nothing waits for one.
    await until(lambda: len(stream.relay.answers) >= 2, limit_s=module.QUESTION_TIMEOUT_S)
    assert not any(stream.relay.answers)
    peer.may_answer.set()
    nats.start()
    await until(lambda: stream.ends)
    assert (stream.texts, stream.ends) == (["0", "1"], [END])


async def test_a_question_in_flight_does_not_hold_up_the_close(connect: Connect, peer: Peer) -> None:
    subscriber = Subscriber(await connect(), reply_inbox=REPLY_INBOX, stream_owner=OWNER)
    await subscriber.start()
    peer.may_answer.clear()
    await peer.send(opened(subscriber), "0", "1", lose=(0,))
    await until(lambda: peer.waiting)
    began = time.monotonic()
    await subscriber.close()
    assert time.monotonic() - began < module.QUESTION_TIMEOUT_S / 2
    peer.may_answer.set()


# Ends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "cancelled"), [("internal_error", True), ("engine_error", False)])
async def test_a_failure_ends_the_stream_and_cancels_what_may_still_run(
    subscriber: Subscriber, peer: Peer, code: str, cancelled: bool
) -> None:
    error = ErrorData(code=code, message="no")
    stream, after = opened(subscriber), opened(subscriber, "after")
    await peer.send(stream, "0", error, "1")
    await peer.send(after, END)
    await until(lambda: after.ends)
    assert (stream.texts, stream.ends) == (["0"], [error])
    assert len(subscriber) == 1
    await subscriber.close()
    assert peer.cancelled == [CancelRequest(request_id="r-s", reason="relay_failed")] * cancelled


async def test_a_reader_that_is_too_slow_is_cut_off_and_cancelled(subscriber: Subscriber, peer: Peer) -> None:
    stream = opened(subscriber, room=2)
    await peer.send(stream, "0", "1", "2", "3", END, lose=(0,))  # All come at once, when the first is repaired.
    await until(lambda: peer.cancelled)
    assert stream.texts == ["0", "1"]
    assert [end.code for end in stream.ends if isinstance(end, ErrorData)] == ["slow_reader"]
    assert len(stream.ends) == 1
    assert peer.cancelled == [CancelRequest(request_id="r-s", reason="slow_reader")]


async def test_when_the_bus_is_lost_for_good_every_stream_ends(connect: Connect, peer: Peer) -> None:
    bus = await connect()
    subscriber = Subscriber(bus, reply_inbox=REPLY_INBOX, stream_owner=OWNER)
    await subscriber.start()
    ended, running = opened(subscriber, "ended"), opened(subscriber, "running")
    await peer.send(ended, END)
    await until(lambda: ended.ends)
    bus.closed.set()
    await until(lambda: running.ends)
    assert ended.ends == [END]
    assert [end.code for end in running.ends if isinstance(end, ErrorData)] == ["unavailable"]
    await subscriber.close()


# Cancels ---------------------------------------------------------------------------------------------------


async def test_a_cancel_is_repeated_until_it_is_durable(subscriber: Subscriber, peer: Peer) -> None:
    peer.cancel_answers = [encode(CancelAnswer(durable=False)), b"no message", encode(CancelAnswer(durable=False))]
    stream = opened(subscriber)
    began = time.monotonic()
    assert await subscriber.cancel(stream, "client_disconnected")
    assert time.monotonic() - began >= 3 * module.CANCEL_PAUSE_S
    assert peer.cancelled == [CancelRequest(request_id="r-s", reason="client_disconnected")] * 4
    await asyncio.sleep(2 * module.CANCEL_PAUSE_S)
    assert len(peer.cancelled) == 4


async def test_a_cancel_outlasts_a_bus_that_is_away(subscriber: Subscriber, peer: Peer, nats: NatsServer) -> None:
    stream = opened(subscriber)
    nats.stop()
    await until(lambda: not peer.bus.connected)
    cancelling = subscriber.cancel(stream, "client_cancelled")
    await asyncio.sleep(2 * module.CANCEL_PAUSE_S)
    assert not cancelling.done()
    nats.start()
    assert await asyncio.wait_for(cancelling, 20)
    assert peer.cancelled


async def test_a_cancel_that_is_never_durable_is_given_up(
    subscriber: Subscriber, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CANCEL_S_MAX", 1.2)
    peer.cancel_answers = [encode(CancelAnswer(durable=False))] * 100
    assert not await asyncio.wait_for(subscriber.cancel(opened(subscriber), "client_cancelled"), 10)
    assert 1 < len(peer.cancelled) <= 3


async def test_hang_ups_during_an_outage_are_kept_for_as_long_as_a_request_may_live(
    subscriber: Subscriber, peer: Peer, nats: NatsServer
) -> None:
    assert module.CANCEL_S_MAX * 1000 > DEADLINE_MS_MAX
    streams = [opened(subscriber, f"s{number}") for number in range(300)]
    nats.stop()
    await until(lambda: not peer.bus.connected)
    for stream in streams:
        subscriber.leave(stream, "client_disconnected")
    nats.start()
    await until(lambda: {cancel.request_id for cancel in peer.cancelled} == {f"r-s{n}" for n in range(300)})
    await until(lambda: not subscriber._cancels)


async def test_cancels_that_are_kept_are_bounded(
    subscriber: Subscriber, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CANCELS_MAX", 2)
    peer.cancel_answers = [encode(CancelAnswer(durable=False))] * 100
    tasks = [subscriber.cancel(opened(subscriber, name), "client_disconnected") for name in ("a", "b", "c")]
    await asyncio.wait(tasks[:1])
    assert tasks[0].cancelled() and not any(task.done() for task in tasks[1:])


# Questions ------------------------------------------------------------------------------------------------


async def test_a_stream_has_one_open_question(subscriber: Subscriber, peer: Peer) -> None:
    """However often its relay asks anew while the worker does not answer."""
    peer.may_answer.clear()
    stream = opened(subscriber, repair_again_ms=1, answer_ms_max=1, silence_ms=1)
    await peer.send(stream, "0", "1", "2", lose=(0,))
    ticks = stream.ticks
    await until(lambda: stream.ticks >= ticks + 3)
    assert len(subscriber._questions) == len(peer.asked) == 1
    peer.may_answer.set()
    await until(lambda: stream.texts == ["0", "1", "2"])
    await until(lambda: peer.asked_status)


async def test_no_question_waits_for_a_bus_that_is_away(subscriber: Subscriber, peer: Peer, nats: NatsServer) -> None:
    """Each stream knows at once that nobody can be asked; afterwards each reads on."""
    impatient = {"silence_ms": 100, "status_again_ms": 100, "repair_again_ms": 100, "answer_ms_max": 100}
    streams = [opened(subscriber, f"s{number}", **impatient) for number in range(300)]
    for stream in streams:
        await peer.send(stream, "0")
    nats.stop()
    await until(lambda: not subscriber._bus.connected and not subscriber._questions)
    tasks = len(asyncio.all_tasks())
    ticks = streams[-1].ticks
    await until(lambda: streams[-1].ticks >= ticks + 4)
    assert not subscriber._questions and len(asyncio.all_tasks()) <= tasks
    assert all(stream.relay.answers == [] or stream.relay.answers[-1] is None for stream in streams)
    for stream in streams:
        peer.keep(stream, END)
    nats.start()
    await until(lambda: all(stream.ends == [END] for stream in streams))


async def test_the_bus_that_stays_away_ends_streams_in_time(
    subscriber: Subscriber, peer: Peer, nats: NatsServer
) -> None:
    impatient = {"silence_ms": 100, "status_again_ms": 100, "unreachable_ms_max": 600}
    streams = [opened(subscriber, f"s{number}", **impatient) for number in range(300)]
    nats.stop()
    await until(lambda: all(stream.ends for stream in streams))
    assert {end.code for stream in streams for end in stream.ends if isinstance(end, ErrorData)} == {"unavailable"}
    assert not subscriber._questions
    nats.start()
    await until(lambda: len(peer.cancelled) == 300)


# Joining ---------------------------------------------------------------------------------------------------


async def test_a_joined_stream_reads_all_from_the_worker(subscriber: Subscriber, peer: Peer) -> None:
    """Its frames are sent to another; whoever schedules is told who reads it, too."""
    first = Stream("elsewhere", "r-first", RelaySettings())
    for text in ("0", "1"):
        peer.keep(first, text)
    joined = opened(subscriber, "mine")
    subscriber.join(joined, "r-first", streamed=True)
    await until(lambda: joined.texts == ["0", "1"])
    peer.keep(first, "2")
    peer.keep(first, END)
    await until(lambda: joined.ends == [END])
    assert joined.texts == ["0", "1", "2"]
    assert {(it.request_id, it.reader, it.stream_owner) for it in peer.asked_status} == {("r-first", "mine", OWNER)}


async def test_who_joins_too_late_is_told_that_the_answer_is_gone(subscriber: Subscriber, peer: Peer) -> None:
    peer.status = StatusAnswer(state="ended", attempt=1, worker="w-gone", outcome="completed", last_seq=3)
    joined = opened(subscriber, "mine")
    subscriber.join(joined, "r-first", streamed=True)
    await peer.bus.subscribe(
        subjects.frames("w-gone", TENANT), lambda message: message.respond(encode(FramesAnswer(known=False)))
    )
    await until(lambda: joined.ends)
    assert [end.code for end in joined.ends if isinstance(end, ErrorData)] == ["conflict"]


# Signs of life ---------------------------------------------------------------------------------------------


async def test_heartbeats_come_twice_a_second_and_stop_after_the_goodbye(connect: Connect, peer: Peer) -> None:
    subscriber = Subscriber(await connect(), reply_inbox=REPLY_INBOX, stream_owner=OWNER)
    await subscriber.start()
    began = time.monotonic()
    await until(lambda: len(peer.beats) >= 4)
    assert time.monotonic() - began >= 1.2
    # What must still settle is waited for, and the heartbeats go on meanwhile.
    peer.cancel_answers = [encode(CancelAnswer(durable=False))] * 2
    subscriber.leave(opened(subscriber), "client_disconnected")
    before = len(peer.beats)
    await subscriber.close()
    assert len(peer.cancelled) == 3
    await until(lambda: peer.beats[-1].leaving)
    beats = list(peer.beats)
    assert len(beats) - before >= 2
    assert [beat.leaving for beat in beats] == [False] * (len(beats) - 1) + [True]
    assert {beat.stream_owner for beat in beats} == {OWNER}
    await asyncio.sleep(3 * module.HEARTBEAT_S)
    assert peer.beats == beats


async def test_heartbeats_resume_after_an_outage_and_none_is_kept_for_later(
    subscriber: Subscriber, peer: Peer, nats: NatsServer
) -> None:
    await until(lambda: peer.beats)
    nats.stop()
    await until(lambda: not peer.bus.connected)
    before = len(peer.beats)
    await asyncio.sleep(4 * module.HEARTBEAT_S)
    nats.start()
    await until(lambda: peer.bus.connected)
    await until(lambda: len(peer.beats) > before)
    await asyncio.sleep(0.2)  # Kept ones would come at once, with the first.
    assert len(peer.beats) - before <= 2
