"""The relay: order, fence, repair, ends. Scripted cases, then random worlds with loss and retries."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.errors import TABLE
from contracts.messages.base import Epoch, Outcome
from contracts.messages.control import StatusAnswer
from contracts.messages.frames import EndData, ErrorData, Frame, FrameKind, FramesAnswer, LostData
from contracts.streaming.generation import Bounds
from contracts.streaming.pattern import text_at
from contracts.streaming.relay import AskFrames, AskStatus, Effect, Fail, Finish, Forward, Relay, RelaySettings

_end_of = msgspec.json.Decoder(EndData).decode
_END = EndData(outcome="completed", finish_reason="stop", prompt_tokens=3, completion_tokens=2)


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def frame(attempt: int, seq: int, kind: FrameKind, data: object = None) -> Frame:
    return Frame(stream="s", attempt=attempt, seq=seq, kind=kind, data=raw(data) if data is not None else msgspec.Raw())


def chunk(attempt: int, seq: int, text: str = "") -> Frame:
    return frame(attempt, seq, "chunk", {"text": text or f"{attempt}.{seq}"})


def with_text(attempt: int, seq: int, text: str = "") -> Frame:
    """A chunk whose text others may differ in."""
    whole = chunk(attempt, seq, text)
    return msgspec.structs.replace(whole, text_at=text_at(bytes(whole.data)))


def text(attempt: int, seq: int, text: str = "") -> Frame:
    return frame(attempt, seq, "text", text or f"{attempt}.{seq}")


def end(attempt: int, seq: int, outcome: Outcome = "completed") -> Frame:
    return frame(attempt, seq, "end", msgspec.structs.replace(_END, outcome=outcome))


def lost(attempt: int, retry: bool) -> Frame:
    return frame(attempt, -1, "lost", LostData(retry=retry, tell=retry))


def texts(effects: Sequence[Effect]) -> list[str]:
    return [msgspec.json.decode(e.data)["text"] for e in effects if isinstance(e, Forward)]


def hear(relay: Relay, worker: str, frame: Frame, now_ms: int) -> Sequence[Effect]:
    """As a subscriber does."""
    if frame.kind == "text" and (pattern := relay.next_text(worker, frame, now_ms)) is not None:
        return [Forward(pattern.filled(bytes(frame.data)))]
    return relay.on_frame(worker, frame, now_ms)


def fail_code(effects: Sequence[Effect]) -> str:
    assert isinstance(effects[-1], Fail), effects
    return effects[-1].error.code


def new(stream: bool = True, bounds: Bounds | None = None) -> Relay:
    return Relay(stream=stream, now_ms=0, settings=RelaySettings(bounds=bounds or Bounds()))


# Order ------------------------------------------------------------------------------------------------------


def test_frames_in_order_are_forwarded_at_once_and_the_end_finishes() -> None:
    relay = new()
    assert relay.on_frame("w", frame(1, 0, "accepted"), 1) == []
    assert texts(relay.on_frame("w", chunk(1, 1, "a"), 2)) == ["a"]
    assert texts(relay.on_frame("w", chunk(1, 2, "b"), 3)) == ["b"]
    assert list(relay.on_frame("w", end(1, 3), 4)) == [Finish(_END)]
    assert relay.finished


def test_after_the_end_nothing_has_an_effect() -> None:
    relay = new()
    relay.on_frame("w", end(1, 0), 1)
    assert not relay.on_frame("w", chunk(1, 1), 2)
    assert not relay.on_frame("v", chunk(2, 0), 2)
    assert not relay.on_frame("", lost(1, False), 2)
    assert not relay.on_status(None, 3)
    assert not relay.on_frames_answer("w", 1, FramesAnswer(known=False), 3)
    assert not relay.on_tick(1_000_000)


def test_a_frame_that_came_before_is_dropped() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 1)
    assert not relay.on_frame("w", chunk(1, 0), 2)
    relay.on_frame("w", chunk(1, 2), 3)
    assert not relay.on_frame("w", chunk(1, 2), 4)
    assert texts(relay.on_frame("w", chunk(1, 1), 5)) == ["1.1", "1.2"]


def test_an_error_frame_counts_in_its_place() -> None:
    """The failure is told after every chunk before it, also when it overtakes one."""
    relay = new()
    relay.on_frame("w", chunk(1, 0), 1)
    error = ErrorData(code="engine_error", message="no")
    assert relay.on_frame("w", frame(1, 2, "error", error), 2) == [AskFrames("w", 1, 1)]
    effects = relay.on_frame("w", chunk(1, 1), 3)
    assert texts(effects) == ["1.1"]
    assert effects[-1] == Fail(error)


def test_a_code_that_is_not_in_the_table_becomes_an_internal_error() -> None:
    relay = new()
    error = ErrorData(code="of_tomorrow", message="m", status=418)
    assert relay.on_frame("w", frame(1, 0, "error", error), 1) == [
        Fail(ErrorData(code="internal_error", message="m", status=418))
    ]


@pytest.mark.parametrize("data", [msgspec.Raw(), msgspec.Raw(b"[1]"), msgspec.Raw(b'{"outcome":"odd"}')])
@pytest.mark.parametrize("kind", ["end", "error"])
def test_a_malformed_closing_frame_fails_the_stream(kind: FrameKind, data: msgspec.Raw) -> None:
    relay = new()
    effects = relay.on_frame("w", Frame(stream="s", attempt=1, seq=0, kind=kind, data=data), 1)
    assert fail_code(effects) == "internal_error"


# Texts ------------------------------------------------------------------------------------------------------


def test_a_text_takes_the_place_of_that_of_the_last_chunk() -> None:
    relay = new()
    assert texts(hear(relay, "w", with_text(1, 0, "a"), 1)) == ["a"]
    assert texts(hear(relay, "w", text(1, 1, 'b"'), 2)) == ['b"']
    assert texts(hear(relay, "w", with_text(1, 2, "c"), 3)) == ["c"]
    assert not texts(hear(relay, "w", text(1, 4, "e"), 4))
    assert texts(hear(relay, "w", text(1, 3, "d"), 5)) == ["d", "e"]


@pytest.mark.parametrize("before", [[], [chunk(1, 0)], [with_text(1, 0), chunk(1, 1)], [frame(1, 0, "part", "a")]])
def test_a_text_without_its_chunk_fails_the_stream(before: list[Frame]) -> None:
    relay = new()
    for each in before:
        hear(relay, "w", each, 1)
    assert fail_code(hear(relay, "w", text(1, len(before)), 2)) == "internal_error"


@pytest.mark.parametrize("at", [(0, 5), (5, 5), (9, 3), (3, 1000)])
def test_a_text_that_is_not_within_its_chunk_fails_the_stream(at: tuple[int, int]) -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 1)
    assert fail_code(relay.on_frame("w", msgspec.structs.replace(chunk(1, 1), text_at=at), 2)) == "internal_error"


# Parts ------------------------------------------------------------------------------------------------------


def test_parts_are_joined_with_the_chunk_that_closes_them() -> None:
    relay = new()
    whole = '{"text":"' + "ü" * 50 + '\\n"}'
    assert relay.on_frame("w", frame(1, 0, "part", whole[:20]), 1) == []
    assert relay.on_frame("w", frame(1, 1, "part", whole[20:40]), 1) == []
    assert relay.on_frame("w", frame(1, 2, "chunk", whole[40:]), 1) == [Forward(whole.encode())]
    assert texts(relay.on_frame("w", chunk(1, 3, "next"), 2)) == ["next"]


def test_an_answer_over_the_bound_fails() -> None:
    relay = new(bounds=Bounds(assembled_bytes_max=10))
    relay.on_frame("w", frame(1, 0, "part", "123456"), 1)
    assert fail_code(relay.on_frame("w", frame(1, 1, "part", "78901"), 1)) == "internal_error"


def test_an_end_between_parts_never_looks_finished() -> None:
    relay = new()
    relay.on_frame("w", frame(1, 0, "part", "123456"), 1)
    assert fail_code(relay.on_frame("w", end(1, 1), 1)) == "stream_interrupted"


def test_a_part_that_is_not_text_fails_the_stream() -> None:
    relay = new()
    bad = Frame(stream="s", attempt=1, seq=0, kind="part", data=msgspec.Raw(b'"\\ud800"'))
    assert fail_code(relay.on_frame("w", bad, 1)) == "internal_error"


# Fence ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["accepted", "chunk"])
def test_a_higher_attempt_ends_a_stream_that_showed_a_lower_one(kind: FrameKind) -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 1)
    assert fail_code(relay.on_frame("v", frame(2, 0, kind, {}), 2)) == "worker_lost"


def test_lost_ends_a_stream_that_showed_the_attempt() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 1)
    assert fail_code(relay.on_frame("", lost(1, True), 2)) == "worker_lost"


def test_before_a_chunk_was_shown_the_next_attempt_answers_alone() -> None:
    relay = new()
    relay.on_frame("w", frame(1, 0, "accepted"), 1)
    relay.on_frame("w", chunk(1, 2, "late"), 1)  # Held behind a gap: the caller saw nothing.
    assert relay.on_frame("", lost(1, True), 2) == (AskStatus(),) and relay.void_below == 2
    assert not relay.on_frame("w", chunk(1, 1, "zombie"), 3)
    assert not relay.on_frame("w", end(1, 3), 3)
    assert texts(relay.on_frame("v", chunk(2, 0, "clean"), 4)) == ["clean"]
    assert not relay.on_frame("w", chunk(1, 1, "zombie"), 5)
    assert not relay.on_frame("", lost(1, True), 5)
    assert relay.on_frame("v", end(2, 1), 6) == [Finish(_END)]


def test_that_nothing_was_seen_is_told_until_the_scheduler_knows_it() -> None:
    """By the question that follows a loss; again when the loss is told again, or a status shows another attempt."""
    relay = new()
    assert relay.on_frame("", lost(1, True), 1) == (AskStatus(),)
    assert not relay.on_frame("", lost(1, True), 2), "a question is open that carries it"
    assert not relay.on_status(StatusAnswer(state="queued", attempt=2), 3), "it knows"
    assert relay.on_frame("", lost(1, True), 4) == (AskStatus(),)
    assert relay.on_status(StatusAnswer(state="queued", attempt=3), 5) == (AskStatus(),) and relay.void_below == 3
    assert not relay.on_status(StatusAnswer(state="queued", attempt=3), 6)


def test_a_status_that_voids_what_was_shown_ends_the_stream() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 1)
    assert fail_code(relay.on_status(StatusAnswer(state="queued", attempt=2), 2)) == "worker_lost"


def test_the_same_worker_may_hold_the_next_attempt() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 1)
    assert fail_code(relay.on_frame("w", chunk(2, 1), 2)) == "worker_lost"
    relay = new()
    relay.on_frame("w", frame(1, 0, "accepted"), 1)
    assert texts(relay.on_frame("w", chunk(2, 0), 2)) == ["2.0"]
    assert not relay.on_frame("w", chunk(1, 1), 3)


def test_lost_without_retry_fails_at_once() -> None:
    assert fail_code(new().on_frame("", lost(1, False), 1)) == "worker_lost"


def test_the_first_worker_with_a_chunk_is_the_only_one_heard() -> None:
    relay = new()
    relay.on_frame("w", frame(1, 0, "accepted"), 1)
    assert texts(relay.on_frame("v", chunk(1, 0, "v"), 2)) == ["v"]
    assert not relay.on_frame("w", chunk(1, 1, "w"), 3)
    assert relay.on_frame("v", end(1, 1), 4) == [Finish(_END)]


def test_the_schedulers_error_ends_any_stream() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 1)
    error = ErrorData(code="request_quarantined", message="no")
    assert relay.on_frame("", frame(1, -1, "error", error), 2) == (Fail(error),)


def test_frames_of_a_deposed_scheduler_are_dropped() -> None:
    relay = new()
    error = ErrorData(code="deadline_exceeded", message="late")
    assert relay.on_frame("", lost(1, True), 1, Epoch(5, 2)) == (AskStatus(),)
    assert not relay.on_frame("", frame(2, -1, "error", error), 2, Epoch(5, 1))
    assert relay.on_frame("", frame(2, -1, "error", error), 2, Epoch(6, 1)) == (Fail(error),)


# Whole answers ----------------------------------------------------------------------------------------------


def test_a_whole_answer_is_forwarded_only_with_its_end() -> None:
    relay = new(stream=False)
    assert relay.on_frame("w", chunk(1, 0, "all"), 1) == []
    assert not relay.started
    effects = relay.on_frame("w", end(1, 1), 2)
    assert texts(effects) == ["all"]
    assert list(effects)[1:] == [Finish(_END)]


@pytest.mark.parametrize("by_lost", [True, False])
def test_a_gathered_answer_of_a_void_attempt_is_thrown_away(by_lost: bool) -> None:
    relay = new(stream=False)
    relay.on_frame("w", chunk(1, 0, "old"), 1)
    if by_lost:
        assert relay.on_frame("", lost(1, True), 2) == ()
    assert relay.on_frame("v", chunk(2, 0, "new"), 3) == []
    assert not relay.on_frame("w", end(1, 1), 4)
    assert texts(relay.on_frame("v", end(2, 1), 5)) == ["new"]


def test_a_cancelled_answer_is_not_forwarded() -> None:
    relay = new(stream=False)
    relay.on_frame("w", chunk(1, 0, "all"), 1)
    (effect,) = relay.on_frame("w", end(1, 1, "cancelled"), 2)
    assert isinstance(effect, Finish)
    assert effect.end.outcome == "cancelled"


def test_an_end_without_an_answer_and_a_second_answer_fail() -> None:
    assert fail_code(new(stream=False).on_frame("w", end(1, 0), 1)) == "internal_error"
    relay = new(stream=False)
    relay.on_frame("w", chunk(1, 0), 1)
    assert fail_code(relay.on_frame("w", chunk(1, 1), 1)) == "internal_error"


# Repair -----------------------------------------------------------------------------------------------------


def test_a_gap_is_asked_for_again_until_it_closes() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    assert relay.on_frame("w", chunk(1, 3), 10) == [AskFrames("w", 1, 1)]
    assert relay.on_frame("w", chunk(1, 4), 20) == []
    assert relay.on_frames_answer("w", 1, None, 30) == ()
    assert relay.on_tick(400) == []
    assert relay.on_tick(510) == [AskFrames("w", 1, 1)]
    answer = FramesAnswer(known=True, frames=[chunk(1, 1), chunk(1, 2), chunk(1, 3)])
    assert texts(relay.on_frames_answer("w", 1, answer, 520)) == ["1.1", "1.2", "1.3", "1.4"]
    assert relay.on_tick(1_100) == []


def test_pages_are_read_one_after_the_other() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    relay.on_frame("w", end(1, 5), 10)
    effects = relay.on_frames_answer("w", 1, FramesAnswer(known=True, frames=[chunk(1, 1), chunk(1, 2)], more=True), 20)
    assert texts(effects) == ["1.1", "1.2"]
    assert effects[-1] == AskFrames("w", 1, 3)
    effects = relay.on_frames_answer("w", 1, FramesAnswer(known=True, frames=[chunk(1, 3), chunk(1, 4)]), 30)
    assert texts(effects) == ["1.3", "1.4"]
    assert effects[-1] == Finish(_END)


def test_an_answer_that_brings_nothing_is_not_followed_at_once() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 1), 0)
    assert not relay.on_frames_answer("w", 1, FramesAnswer(known=True, more=True), 10)
    assert relay.on_tick(500) == [AskFrames("w", 1, 0)]


def test_what_was_held_frees_its_room() -> None:
    relay = new(bounds=Bounds(held_bytes_max=20))
    for seq in range(0, 100, 2):
        assert not texts(relay.on_frame("w", chunk(1, seq + 1, "b"), seq))
        assert texts(relay.on_frame("w", chunk(1, seq, "a"), seq)) == ["a", "b"]


def test_a_repair_without_progress_fails_within_its_bound() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    relay.on_frame("w", chunk(1, 2), 100)
    now = 100
    while not (effects := [e for e in relay.on_tick(now) if isinstance(e, Fail)]):
        relay.on_frames_answer("w", 1, FramesAnswer(known=True), now)
        relay.on_status(StatusAnswer(state="running", attempt=1, worker="w"), now)
        now += 250
    assert fail_code(effects) == "stream_interrupted"
    assert now == 10_100


@pytest.mark.parametrize("told", [True, False], ids=["in time", "never"])
def test_a_gap_is_kept_open_while_its_worker_stands_still(told: bool) -> None:
    """Who is late is not gone: the scheduler gives it up after 30 s, and until then a gap is no reason to fail."""
    relay = new()
    relay.on_frame("w", chunk(1, 1), 0)
    for now in range(0, 29_000, 250):
        for effect in relay.on_tick(now):
            assert not isinstance(effect, Fail), now
            if isinstance(effect, AskStatus):
                relay.on_status(StatusAnswer(state="running", attempt=1, worker="w"), now)
            elif told and isinstance(effect, AskFrames):
                relay.on_frames_answer("w", 1, None, now)
    came = relay.on_frames_answer("w", 1, FramesAnswer(known=True, frames=[chunk(1, 0)]), 29_000)
    assert texts(came) == ["1.0", "1.1"]


def test_a_worker_that_sends_and_does_not_answer_is_given_up() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 1), 0)
    now, failed = 0, False
    while not failed:
        now += 250
        relay.on_frame("w", chunk(1, 1 + now // 250), now)
        failed = any(isinstance(effect, Fail) for effect in relay.on_tick(now))
    assert now == 10_000


def test_progress_renews_the_bound() -> None:
    relay = new()
    relay.on_frame("w", end(1, 100), 0)
    for seq in range(100):
        now = seq * 9_000
        relay.on_frames_answer("w", 1, FramesAnswer(known=True, frames=[chunk(1, seq)]), now)
        assert not [e for e in relay.on_tick(now + 8_999) if isinstance(e, Fail)]
    assert relay.finished


def test_a_worker_that_no_longer_keeps_the_attempt_ends_the_stream() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    relay.on_frame("w", chunk(1, 2), 1)
    assert fail_code(relay.on_frames_answer("w", 1, FramesAnswer(known=False), 2)) == "stream_interrupted"


def test_an_answer_for_a_gap_that_closed_by_itself_changes_nothing() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    relay.on_frame("w", chunk(1, 2), 1)
    relay.on_frame("w", chunk(1, 1), 2)
    assert not relay.on_frames_answer("w", 1, FramesAnswer(known=False), 3)
    assert not relay.on_frames_answer("v", 1, FramesAnswer(known=False), 3)
    assert not relay.on_frames_answer("w", 2, FramesAnswer(known=False), 3)


@pytest.mark.parametrize("bounds", [Bounds(held_frames_max=3), Bounds(held_bytes_max=60)])
def test_what_does_not_fit_behind_a_gap_is_asked_for_later(bounds: Bounds) -> None:
    relay = new(bounds=bounds)
    for seq in range(1, 20):
        relay.on_frame("w", chunk(1, seq), 0)
    seen: list[str] = []
    now = 0
    asked = AskFrames("w", 1, 0)
    while len(seen) < 20:
        now += 600
        page = [chunk(1, seq) for seq in range(asked.from_seq, min(asked.from_seq + 5, 20))]
        effects = relay.on_frames_answer("w", 1, FramesAnswer(known=True, frames=page), now)
        seen += texts(effects)
        if isinstance(effects[-1], AskFrames):
            asked = effects[-1]
    assert seen == [f"1.{seq}" for seq in range(20)]


# Silence ----------------------------------------------------------------------------------------------------


def test_silence_is_asked_about_at_the_scheduler_and_queued_waits_on() -> None:
    relay = new()
    assert relay.on_tick(3_999) == []
    assert relay.on_tick(4_000) == [AskStatus()]
    assert relay.on_tick(4_250) == []
    for now in range(5_000, 3_600_000, 10_000):
        assert not relay.on_status(StatusAnswer(state="queued"), now)
        assert relay.on_tick(now + 7_999) == []
        assert relay.on_tick(now + 8_000) == [AskStatus()]
    assert not relay.finished


def test_a_question_without_any_answer_is_put_again() -> None:
    relay = new()
    assert relay.on_tick(4_000) == [AskStatus()]
    assert relay.on_tick(8_999) == []
    assert relay.on_tick(9_000) == [AskStatus()]


def test_a_frame_shortens_the_silence_limit_again() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    relay.on_tick(4_000)
    relay.on_status(StatusAnswer(state="running", attempt=1, worker="w"), 4_000)
    relay.on_frame("w", chunk(1, 1), 5_000)
    relay.on_frame("w", chunk(1, 2), 5_000)
    assert relay.on_tick(9_000) == [AskStatus()]


@pytest.mark.parametrize("stream", [True, False])
def test_a_lost_tail_is_repaired_from_the_status(stream: bool) -> None:
    relay = new(stream)
    seen = texts(relay.on_frame("w", frame(1, 0, "accepted"), 0))
    assert relay.on_tick(4_000) == [AskStatus()]
    status = StatusAnswer(state="ended", attempt=1, worker="w", outcome="completed", last_seq=2)
    assert relay.on_status(status, 4_010) == [AskFrames("w", 1, 1)]
    effects = relay.on_frames_answer("w", 1, FramesAnswer(known=True, frames=[chunk(1, 1), end(1, 2)]), 4_020)
    seen += texts(effects)
    assert seen == ["1.1"]
    assert effects[-1] == Finish(_END)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("outcome", ["completed", "cancelled"])
def test_where_only_the_end_is_missing_the_scheduler_says_what_it_was(stream: bool, outcome: Outcome) -> None:
    """The worker stored the end and died before it could send it."""
    relay = new(stream)
    seen = texts(relay.on_frame("w", frame(1, 0, "accepted"), 0))
    seen += texts(relay.on_frame("w", chunk(1, 1), 1))
    said = msgspec.structs.replace(_END, outcome=outcome)
    status = StatusAnswer(state="ended", attempt=1, worker="w", outcome=outcome, last_seq=2, end=said)
    effects = relay.on_status(status, 4_010)
    seen += texts(effects)
    assert seen == (["1.1"] if stream or outcome == "completed" else [])
    assert effects[-1] == Finish(said)


def test_the_end_is_synthesised_once_the_chunks_before_it_have_come() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    status = StatusAnswer(state="ended", attempt=1, worker="w", outcome="completed", last_seq=3, end=_END)
    assert relay.on_status(status, 4_000) == [AskFrames("w", 1, 1)]
    assert texts(relay.on_frame("w", chunk(1, 1), 4_001)) == ["1.1"]
    effects = relay.on_frame("w", chunk(1, 2), 4_002)
    assert texts(effects) == ["1.2"]
    assert effects[-1] == Finish(_END)


def test_a_known_end_does_not_stand_for_chunks_that_cannot_be_had() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    status = StatusAnswer(state="ended", attempt=1, worker="w", outcome="completed", last_seq=3, end=_END)
    relay.on_status(status, 4_000)
    assert texts(relay.on_frame("w", chunk(1, 2), 4_001)) == []
    assert fail_code(relay.on_frames_answer("w", 1, FramesAnswer(known=False), 4_010)) == "stream_interrupted"


def test_a_known_end_between_parts_never_looks_finished() -> None:
    relay = new()
    relay.on_frame("w", frame(1, 0, "part", "123456"), 0)
    status = StatusAnswer(state="ended", attempt=1, worker="w", outcome="completed", last_seq=1, end=_END)
    assert fail_code(relay.on_status(status, 4_000)) == "stream_interrupted"


def test_an_attempt_of_which_nothing_arrived_is_fetched_whole() -> None:
    relay = new()
    status = StatusAnswer(state="ended", attempt=2, worker="v", outcome="completed", last_seq=1)
    assert relay.on_status(status, 4_010) == [AskFrames("v", 2, 0)]
    effects = relay.on_frames_answer("v", 2, FramesAnswer(known=True, frames=[chunk(2, 0), end(2, 1)]), 4_020)
    assert texts(effects) == ["2.0"]
    assert effects[-1] == Finish(_END)


def test_a_running_attempt_is_looked_at_and_found_waiting() -> None:
    relay = new()
    status = StatusAnswer(state="running", attempt=1, worker="w")
    assert relay.on_status(status, 4_000) == [AskFrames("w", 1, 0)]
    assert relay.on_frames_answer("w", 1, FramesAnswer(known=False), 4_010) == ()
    assert relay.on_status(status, 12_000) == [AskFrames("w", 1, 0)]
    answer = FramesAnswer(known=True, frames=[frame(1, 0, "accepted"), chunk(1, 1)])
    assert texts(relay.on_frames_answer("w", 1, answer, 12_010)) == ["1.1"]
    assert texts(relay.on_frame("w", chunk(1, 2), 12_020)) == ["1.2"]


def test_a_running_attempt_is_read_page_by_page() -> None:
    relay = new()
    relay.on_status(StatusAnswer(state="running", attempt=1, worker="w"), 4_000)
    page = FramesAnswer(known=True, frames=[chunk(1, 0), chunk(1, 1)], more=True)
    effects = relay.on_frames_answer("w", 1, page, 4_010)
    assert texts(effects) == ["1.0", "1.1"]
    assert effects[-1] == AskFrames("w", 1, 2)


def test_a_running_higher_attempt_ends_a_stream_that_showed_a_lower_one() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    assert fail_code(relay.on_status(StatusAnswer(state="running", attempt=2, worker="v"), 4_000)) == "worker_lost"


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ("completed", "stream_interrupted"),
        ("cancelled", "cancelled"),
        ("failed", "engine_error"),
        ("lost", "worker_lost"),
        ("expired", "deadline_exceeded"),
    ],
)
def test_an_end_whose_frames_cannot_be_had_is_an_error(outcome: Outcome, code: str) -> None:
    relay = new()
    status = StatusAnswer(state="ended", attempt=1, worker="w", outcome=outcome, last_seq=3)
    effects = relay.on_status(status, 4_000)
    if not relay.finished:
        assert effects == [AskFrames("w", 1, 0)]
        effects = relay.on_frames_answer("w", 1, FramesAnswer(known=False), 4_010)
    assert fail_code(effects) == code
    assert TABLE[code]
    assert fail_code(new().on_status(StatusAnswer(state="ended", outcome=outcome), 4_000)) == code


def test_a_failed_attempt_without_a_closing_frame_gives_its_chunks_and_the_stored_error() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    error = ErrorData(code="engine_error", message="stored")
    status = StatusAnswer(state="ended", attempt=1, worker="w", outcome="failed", last_seq=1, error=error)
    assert relay.on_status(status, 4_000) == [AskFrames("w", 1, 1)]
    effects = relay.on_frames_answer("w", 1, FramesAnswer(known=True, frames=[chunk(1, 1)]), 4_010)
    assert texts(effects) == ["1.1"]
    assert effects[-1] == Fail(error)


@pytest.mark.parametrize(("started", "code"), [(True, "stream_interrupted"), (False, "unavailable")])
def test_a_request_that_nobody_knows_ends(started: bool, code: str) -> None:
    relay = new()
    if started:
        relay.on_frame("w", chunk(1, 0), 0)
    for now in (4_000, 6_000):
        assert AskStatus() in relay.on_tick(now)
        assert all(isinstance(e, AskFrames) for e in relay.on_status(StatusAnswer(state="unknown"), now))
        relay.on_frames_answer("w", 1, None, now)
    assert AskStatus() in relay.on_tick(8_000)
    assert fail_code(relay.on_status(StatusAnswer(state="unknown"), 8_000)) == code


def test_unknown_counts_only_in_a_row() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    for seq in range(1, 20):
        relay.on_status(StatusAnswer(state="unknown"), seq * 5_000)
        relay.on_status(StatusAnswer(state="unknown"), seq * 5_000 + 2_000)
        assert texts(relay.on_frame("w", chunk(1, seq), seq * 5_000 + 2_100)) == [f"1.{seq}"]


def test_a_queued_request_was_not_unknown() -> None:
    relay = new()
    for state in ("unknown", "unknown", "queued", "unknown", "unknown"):
        assert not relay.on_status(StatusAnswer(state=state), 4_000)
    assert not relay.finished


def test_an_unreachable_scheduler_is_waited_for_while_the_worker_is_asked() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    now = 4_000
    while not relay.finished:
        effects = relay.on_tick(now)
        if AskStatus() in effects:
            effects = relay.on_status(None, now)
            if not relay.finished:
                assert effects == [AskFrames("w", 1, 1)]
                relay.on_frames_answer("w", 1, None, now)
        now += 500
    assert fail_code(effects) == "stream_interrupted"
    assert now >= 64_000


def test_a_worker_that_answers_while_the_scheduler_is_away_finishes_the_stream() -> None:
    relay = new()
    relay.on_frame("w", chunk(1, 0), 0)
    relay.on_tick(4_000)
    assert relay.on_status(None, 4_000) == [AskFrames("w", 1, 1)]
    effects = relay.on_frames_answer("w", 1, FramesAnswer(known=True, frames=[end(1, 1)]), 4_010)
    assert effects == [Finish(_END)]


# Random worlds ----------------------------------------------------------------------------------------------


class World:
    """A truthful scheduler and workers behind a bus that loses, doubles and reorders.

    Attempts before the last end as ``lost``, each after some frames; the last one ends as ``outcome``. With
    ``mute`` its worker dies once that is stored, before it can send its closing frame.
    """

    def __init__(self, attempts: list[int], outcome: Outcome, *, forgets: bool, one_worker: bool, mute: bool) -> None:
        self.generations = []
        for number, chunks in enumerate(attempts, 1):
            frames = [frame(number, 0, "accepted")]
            frames += [(with_text, text, text, chunk)[seq % 4 - 1](number, seq) for seq in range(1, chunks + 1)]
            self.generations.append(("w" if one_worker else f"w{number}", frames))
        self.outcome = outcome
        self.error = ErrorData(code="engine_error", message="the engine failed")
        frames = self.generations[-1][1]
        if outcome == "failed":
            frames.append(frame(len(attempts), len(frames), "error", self.error))
        elif outcome in ("completed", "cancelled"):
            frames.append(end(len(attempts), len(frames), outcome))
        self.forgets = forgets
        self.mute = mute

    def wire(self) -> list[tuple[str, Frame]]:
        frames = [(worker, f) for worker, sent in self.generations for f in sent]
        if self.mute:
            frames.pop()
        return frames + [("", lost(number, True)) for number in range(1, len(self.generations))]

    def status(self) -> StatusAnswer:
        worker, frames = self.generations[-1]
        return StatusAnswer(
            state="ended",
            attempt=len(self.generations),
            worker=worker,
            outcome=self.outcome,
            last_seq=len(frames) - 1,
            error=self.error if self.outcome == "failed" else None,
            end=None if self.outcome in ("failed", "lost") else _end_of(frames[-1].data),
        )

    def frames(self, ask: AskFrames) -> FramesAnswer | None:
        worker, frames = self.generations[ask.attempt - 1]
        assert worker == ask.worker
        if ask.attempt < len(self.generations) or self.outcome == "lost" or self.mute:
            return None  # Dead.
        if self.forgets:
            return FramesAnswer(known=False)
        page = frames[ask.from_seq : ask.from_seq + 3]
        return FramesAnswer(known=True, frames=page, more=ask.from_seq + 3 < len(frames))

    def chunks(self, number: int) -> list[str]:
        kinds = ("chunk", "text")
        return [f"{number}.{f.seq}" for f in self.generations[number - 1][1] if f.kind in kinds]


class Witness:
    """Gathers effects and checks what holds after every step."""

    def __init__(self, relay: Relay, world: World, stream: bool) -> None:
        self.relay = relay
        self.world = world
        self.stream = stream
        self.seen: list[str] = []
        self.terminal: Finish | Fail | None = None
        self.asks: list[AskFrames | AskStatus] = []

    def take(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            assert self.terminal is None, "an effect after the terminal one"
            if isinstance(effect, Finish | Fail):
                self.terminal = effect
            elif isinstance(effect, Forward):
                self.seen += texts([effect])
            else:
                self.asks.append(effect)
        assert self.relay.finished == (self.terminal is not None)
        assert self.relay.started == bool(self.seen)
        if self.seen:
            number = int(self.seen[0].split(".")[0])
            assert self.seen == self.world.chunks(number)[: len(self.seen)], "no prefix of one generation"

    def check_the_end(self) -> None:
        assert self.terminal is not None
        last = len(self.world.generations)
        if isinstance(self.terminal, Finish):
            assert self.world.outcome == self.terminal.end.outcome
            if self.stream or self.world.outcome == "completed":
                assert self.seen == self.world.chunks(last)
        else:
            assert self.terminal.error.code in TABLE
            if not self.stream:
                assert not self.seen


@st.composite
def worlds(draw: st.DrawFn, stream: bool) -> World:
    attempts = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    outcome: Outcome = draw(st.sampled_from(["completed", "cancelled", "failed", "lost"]))
    if not stream:
        attempts = [min(chunks, 1) for chunks in attempts[:-1]] + [1]
    forgets, one_worker, mute = draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))
    return World(attempts, outcome, forgets=forgets, one_worker=one_worker, mute=mute and outcome != "lost")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), stream=st.booleans(), clean=st.booleans())
def test_random_worlds(data: st.DataObject, stream: bool, clean: bool) -> None:
    """Any interleaving with losses and doubles shows a prefix of one generation and ends once; with nothing
    lost for good and nothing shown of a void attempt, it ends as the world did."""
    world = data.draw(worlds(stream))
    wire = world.wire()
    in_order = data.draw(st.booleans(), "in order")
    if not in_order:
        wire = data.draw(st.permutations(wire))
    relay = Relay(stream=stream, now_ms=0, settings=RelaySettings(bounds=Bounds(held_frames_max=2)))
    witness = Witness(relay, world, stream)
    now = 0
    for worker, f in wire:
        fate = 1 if clean else data.draw(st.integers(0, 2), "copies")
        for _ in range(fate):
            now += data.draw(st.sampled_from([0, 1, 700]), "pause")
            witness.take(hear(relay, worker, f, now))
            witness.take(relay.on_tick(now))
            _answer(witness, world, now, reachable=data.draw(st.booleans(), "reachable"))
    for _ in range(400):
        if relay.finished:
            break
        now += 250
        witness.take(relay.on_tick(now))
        _answer(witness, world, now, reachable=True)
    witness.check_the_end()
    shown_void = stream and witness.seen and not witness.seen[0].startswith(f"{len(world.generations)}.")
    repaired = not world.forgets and not world.mute
    if world.outcome == "completed" and not shown_void and (repaired or (clean and in_order)):
        assert isinstance(witness.terminal, Finish)
    if shown_void:
        assert isinstance(witness.terminal, Fail)


def _answer(witness: Witness, world: World, now: int, *, reachable: bool) -> None:
    while witness.asks:
        ask = witness.asks.pop(0)
        if isinstance(ask, AskStatus):
            witness.take(witness.relay.on_status(world.status() if reachable else None, now))
        else:
            answer = world.frames(ask) if reachable else None
            witness.take(witness.relay.on_frames_answer(ask.worker, ask.attempt, answer, now))


_STATUSES = st.builds(
    StatusAnswer,
    state=st.sampled_from(["unknown", "admitted", "queued", "dispatched", "running", "ended"]),
    attempt=st.integers(0, 3),
    worker=st.sampled_from(["", "w1", "w2"]),
    outcome=st.sampled_from([None, "completed", "cancelled", "failed", "lost", "expired"]),
    last_seq=st.integers(-1, 6),
    end=st.sampled_from([None, _END, msgspec.structs.replace(_END, outcome="failed")]),
)
_KINDS = st.sampled_from(["accepted", "chunk", "part", "end", "error", "lost"])
_DATA = st.sampled_from(
    [raw({"text": "x"}), raw("slice"), raw(_END), raw({"code": "engine_error", "message": ""}), msgspec.Raw(b"x")]
)
_FRAMES = st.builds(
    Frame, stream=st.just("s"), attempt=st.integers(-1, 3), seq=st.integers(-1, 6), kind=_KINDS, data=_DATA
)
_EVENTS = st.one_of(
    st.tuples(st.just("frame"), st.sampled_from(["", "w1", "w2", "w3"]), _FRAMES),
    st.tuples(st.just("status"), st.none() | _STATUSES, st.none()),
    st.tuples(
        st.just("answer"),
        st.sampled_from(["w1", "w2"]),
        st.none()
        | st.builds(FramesAnswer, known=st.booleans(), frames=st.lists(_FRAMES, max_size=4), more=st.booleans()),
    ),
    st.tuples(st.just("tick"), st.integers(0, 9_000), st.none()),
)


@settings(max_examples=300, deadline=None)
@given(stream=st.booleans(), events=st.lists(_EVENTS, max_size=40))
def test_nonsense_never_raises_and_ends_at_most_once(stream: bool, events: list[tuple]) -> None:
    relay = new(stream)
    effects: list[Effect] = []
    now = 0
    for kind, one, two in events:
        if kind == "frame":
            effects += relay.on_frame(one, two, now)
        elif kind == "status":
            effects += relay.on_status(one, now)
        elif kind == "answer":
            effects += relay.on_frames_answer(one, two.frames[0].attempt if two and two.frames else 1, two, now)
        else:
            now += one
            effects += relay.on_tick(now)
    ends = [index for index, effect in enumerate(effects) if isinstance(effect, Finish | Fail)]
    assert ends in ([], [len(effects) - 1])
    assert relay.finished == bool(ends)
    if not stream:
        assert sum(isinstance(effect, Forward) for effect in effects) <= 1
