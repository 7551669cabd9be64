"""The gateway's side of a request as gateway.http.inference, admission and streams have it, and its caller's."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from contracts.messages.admission import AdmissionAnswer, AdmissionRequest
from contracts.messages.base import IdempotencyKey
from contracts.messages.control import CancelAnswer, CancelRequest
from contracts.messages.frames import EndData
from contracts.messages.request import Reply, RequestEnvelope
from contracts.streaming.subscriber import MAY_STILL_RUN
from tests.explore import schedulers
from tests.explore.parts import READER as STREAM_OWNER
from tests.explore.parts import TENANT, encode
from tests.explore.records import TICK_MS, Action, Asked, Message, Op, Scenario, Violation

if TYPE_CHECKING:
    from tests.explore.world import World

ASKS_MAX = 8
"""Ticks for which admission is asked for."""
CANCELS_MAX = 30

_admission = msgspec.json.Decoder(AdmissionAnswer)
_cancelled = msgspec.json.Decoder(CancelAnswer)
_end = msgspec.json.Decoder(EndData)


def new_requests(scenario: Scenario) -> Iterator[Asked]:
    for number, stream in enumerate(scenario.streams):
        rid = f"r{number}"
        yield Asked(rid, stream, "v9" if number < scenario.pinned else "", key=rid if scenario.keyed else "")


def actions(world: "World") -> Iterator[Action]:
    if world.gate.up != "up":
        return
    for asked in world.gate.asked:
        if asked.phase == "idle":
            yield "begin", asked.rid
        elif asked.phase == "storing":
            yield "publish", asked.rid


def find(world: "World", rid: str) -> Asked:
    return next(asked for asked in world.gate.asked if asked.rid == rid)


def update(world: "World", rid: str, **changes: Any) -> None:
    made = tuple([a._replace(**changes) if a.rid == rid else a for a in world.gate.asked])
    world.gate = world.gate._replace(asked=made)


def is_tried_again(world: "World", rid: str) -> bool:
    """Whether what becomes of this try is nobody's: its client goes on with another one."""
    return any(asked.rid == rid + "+" for asked in world.gate.asked)


def try_again(world: "World", rid: str, why: str) -> None:
    """Its client hears nothing of it any more; its gateway goes on. The next try has the same key and another name."""
    asked = find(world, rid)
    questions = tuple([entry for entry in asked.questions if entry[0] == ("ask",)])
    update(world, rid, ending=(why, ""), questions=questions, phase="over" if asked.phase == "stored" else asked.phase)
    again = Asked(rid + "+", asked.stream, key=asked.key)
    world.gate = world.gate._replace(asked=(*world.gate.asked, again))


def end(world: "World", rid: str, kind: str, detail: Any = "") -> None:
    """The caller sees an ending."""
    asked = find(world, rid)
    if asked.ending is not None:
        raise Violation("exactly one ending", f"{rid}: {kind} {detail} after {asked.ending}")
    phase = "over" if asked.phase == "stored" or kind != "fail" else asked.phase
    questions = tuple([entry for entry in asked.questions if entry[0] == ("ask",)])
    update(world, rid, ending=(kind, detail), questions=questions, phase=phase)
    if kind == "refused" and rid.endswith("+") and find(world, rid[:-1]).ending == ("unheard", ""):
        cancel(world, rid[:-1], "client_cancelled")  # By its key: the client gives up, and the first try may run.


def cancel(world: "World", rid: str, reason: str) -> None:
    """Cancel until it is durable."""
    if not find(world, rid).cancel:
        update(world, rid, cancel=reason, cancels=0)
        _send_cancel(world, rid)


def _send_cancel(world: "World", rid: str) -> None:
    asked = find(world, rid)
    reader = rid if asked.key else ""
    of = {"request_id": asked.reads or rid}
    if asked.key and asked.cancel == "client_cancelled" and not asked.reads:
        of = {"idempotency_key": asked.key}
    data = encode(CancelRequest(reason=asked.cancel, reader=reader, **of))  # type: ignore[arg-type]
    schedulers.ask_all(world, "cancel", rid, data)


# Submission ------------------------------------------------------------------------------------------------


def _begin(world: "World", rid: str) -> None:
    relay = world.parts.new_relay(stream=find(world, rid).stream, now=world.now)
    update(world, rid, phase="asking", relay=relay, questions=((("ask",), world.now),))
    _ask(world, rid)


def _ask(world: "World", rid: str) -> None:
    data = encode(
        AdmissionRequest(
            request_id=rid,
            tenant=TENANT,
            key_id="k",
            model="m",
            endpoint="chat/completions",
            prompt_tokens=1,
            max_output_tokens=3,
            stream=find(world, rid).stream,
            version=find(world, rid).version,
            deadline_ms=20 * TICK_MS,
            stream_owner=STREAM_OWNER,
            idempotency=_idempotency(world, rid),
            reader=rid,
        )
    )
    schedulers.ask_all(world, "ask", rid, data)


def _idempotency(world: "World", rid: str) -> IdempotencyKey | None:
    key = find(world, rid).key
    return IdempotencyKey(key=key, digest="d") if key else None


def envelope_of(world: "World", rid: str) -> bytes:
    """What is published once the request is admitted."""
    asked = find(world, rid)
    answer = _admission.decode(asked.answer)
    return encode(
        RequestEnvelope(
            request_id=rid,
            tenant=TENANT,
            key_id="k",
            model="m",
            endpoint="chat/completions",
            stream=asked.stream,
            version=asked.version,
            prompt_tokens=1,
            max_output_tokens=3,
            choices=1,
            priority="interactive",
            admitted_at_ms=answer.admitted_at_ms,
            publish_within_ms=answer.publish_within_ms,
            deadline_ms=answer.deadline_ms,
            reply=Reply(subject="reply.v1._gw.g", stream=rid),
            stream_owner=STREAM_OWNER,
            idempotency=_idempotency(world, rid),
        )
    )


def _publish(world: "World", rid: str) -> None:
    answer = _admission.decode(find(world, rid).answer)
    if answer.admitted_at_ms + answer.publish_within_ms <= world.now:
        unconfirmed(world, rid)
        return
    world.store_request(rid, envelope_of(world, rid))
    _submitted(world, rid)


def _submitted(world: "World", rid: str) -> None:
    asked = find(world, rid)
    update(world, rid, phase="stored" if asked.ending is None else "over")


def unconfirmed(world: "World", rid: str) -> None:
    """REQUESTS did not confirm: the request is cancelled, whatever became of it."""
    cancel(world, rid, "publish_unconfirmed")
    asked = find(world, rid)
    if asked.ending is None and asked.key and not rid.endswith("+"):
        try_again(world, rid, "told to")
    elif asked.ending is None:
        end(world, rid, "refused", "unavailable")
    update(world, rid, phase="over")


def leave(world: "World", rid: str) -> None:
    """The caller goes. A service's gateway goes on, and knows nothing of it."""
    phase, questions = find(world, rid).phase, find(world, rid).questions
    end(world, rid, "left")
    if find(world, rid).key:
        asking = tuple([entry for entry in questions if entry[0] == ("ask",)])
        update(world, rid, phase="over" if phase == "stored" else phase, questions=asking)
        cancel(world, rid, "client_cancelled")
        return
    update(world, rid, phase="over", questions=())
    cancel(world, rid, "client_disconnected")


# The relay -------------------------------------------------------------------------------------------------


def feed(world: "World", rid: str, op: Op) -> None:
    asked = find(world, rid)
    if not asked.listens:
        return
    state, outputs = world.parts.relay.step(asked.relay, op, world.now)
    update(world, rid, relay=state)
    for output in outputs:
        match output:
            case ("forward", data):
                text = (*find(world, rid).text, data)
                update(world, rid, text=text)
                _check_text(rid, asked.stream, text)
            case ("finish", data):
                _check_end(world, rid, data)
                end(world, rid, "finish", data)
            case ("fail", code):
                end(world, rid, "fail", code)
                if code in MAY_STILL_RUN:
                    cancel(world, rid, MAY_STILL_RUN[code])
            case ("status?",):
                _put_question(world, rid, ("status?",))
                schedulers.ask_all(world, "status?", rid, world.parts.relay.facts[state][1], *_of(asked))
            case ("frames?", worker, attempt, from_seq):
                _put_question(world, rid, output)
                world.send(("frames?", "", rid, worker, attempt, from_seq, *_of(asked)))
    if outputs and outputs[-1][0] not in ("finish", "fail") and world.parts.relay.facts[state][0]:
        raise Violation("exactly one ending", f"{rid}: the relay has finished without a word")


def _of(asked: Asked) -> tuple[str, ...]:
    """The request that is asked about where it is another's."""
    return (asked.reads,) if asked.reads else ()


def _put_question(world: "World", rid: str, question: Op) -> None:
    open_ = [entry for entry in find(world, rid).questions if entry[0] != question]
    update(world, rid, questions=(*open_, (question, world.now)))


def _check_text(rid: str, stream: bool, text: tuple[bytes, ...]) -> None:
    chunks = [msgspec.json.decode(data) for data in text]
    if len({(attempt, worker) for attempt, worker, _ in chunks}) > 1:
        raise Violation("attempts are never concatenated", f"{rid} was sent {chunks}")
    if [number for _, _, number in chunks] != (list(range(1, len(chunks) + 1)) if stream else ["all"]):
        raise Violation("no hole and no repetition", f"{rid} was sent {chunks}")


def _check_end(world: "World", rid: str, data: bytes) -> None:
    """What the caller is told is what is stored, of the attempt whose text it has."""
    if world.restored:
        return  # What was stored may be lost.
    said = _end.decode(data)
    asked = find(world, rid)
    for number, event in world.ends_of(asked.reads or rid):
        same = (event.outcome, event.prompt_tokens, event.completion_tokens) == (
            said.outcome,
            said.prompt_tokens,
            said.completion_tokens,
        )
        text = [msgspec.json.decode(chunk) for chunk in asked.text]
        whole = said.outcome != "completed" or len(text) == (2 if asked.stream else 1)
        if same and whole and all(chunk[:2] == [number, event.worker] for chunk in text):
            return
    raise Violation("what the caller is told is what is stored", f"{rid} was told {said} after {asked.text}")


def receive(world: "World", message: Message) -> None:
    match message:
        case ("frame", _, rid, worker, revision, data):
            feed(world, rid, ("frame", worker, revision, data))
        case ("status", _, rid, data):
            _close_question(world, rid, ("status?",))
            feed(world, rid, ("status", data))
        case ("frames", _, rid, worker, attempt, data):
            for question, _ in find(world, rid).questions:
                if question[:3] == ("frames?", worker, attempt):
                    _close_question(world, rid, question)
                    feed(world, rid, ("frames", worker, attempt, data))
                    break
        case ("admission", _, rid, data):
            if find(world, rid).phase == "asking":
                _admitted(world, rid, data)
        case ("cancelled", _, rid, data):
            if _cancelled.decode(data).durable:
                update(world, rid, cancel="")


def _close_question(world: "World", rid: str, question: Op) -> None:
    update(world, rid, questions=tuple([q for q in find(world, rid).questions if q[0] != question]))


def _admitted(world: "World", rid: str, data: bytes) -> None:
    answer = _admission.decode(data)
    if find(world, rid).key and answer.code == "unavailable":
        return  # It says when to ask again.
    _close_question(world, rid, ("ask",))
    if answer.joined:
        _join(world, rid, answer.joined)
    elif answer.admitted:
        update(world, rid, phase="storing", answer=data)
    else:
        _give_up(world, rid, answer.code)


def _join(world: "World", rid: str, joined: str) -> None:
    """Nothing is stored; what runs or ran under the key is read from its worker."""
    asked = find(world, rid)
    relay = world.parts.new_relay(stream=asked.stream, now=world.now, joined=True)
    update(world, rid, phase="stored" if asked.ending is None else "over", reads=joined, relay=relay)
    feed(world, rid, ("tick",))


def _give_up(world: "World", rid: str, code: str) -> None:
    if find(world, rid).ending is None:
        end(world, rid, "refused", code)
    update(world, rid, phase="over")


# Time ------------------------------------------------------------------------------------------------------


def pass_time(world: "World") -> None:
    for asked in world.gate.asked:
        rid = asked.rid
        for question, put_at in asked.questions:
            if question == ("ask",):
                _ask_again(world, rid, put_at)
            elif find(world, rid).listens:
                _close_question(world, rid, question)
                feed(world, rid, ("status", b"") if question == ("status?",) else ("frames", *question[1:3], b""))
        feed(world, rid, ("tick",))
        asked = find(world, rid)
        if asked.cancel:
            if asked.cancels >= CANCELS_MAX:
                raise Violation("a cancel is confirmed in the end", rid)
            update(world, rid, cancels=asked.cancels + 1)
            _send_cancel(world, rid)


def _ask_again(world: "World", rid: str, put_at: int) -> None:
    if find(world, rid).phase != "asking":
        return
    if world.now - put_at >= ASKS_MAX * TICK_MS:
        _close_question(world, rid, ("ask",))
        _give_up(world, rid, "unavailable")
    else:
        _ask(world, rid)


STEPS: dict[str, Callable[..., None]] = {"begin": _begin, "publish": _publish}
