"""The canonical forms of a world's records: what no step looks at any more is left out."""

from typing import Any

from tests.explore.canonical import flat, near
from tests.explore.parts import Parts
from tests.explore.records import Asked, Message, Op, Sched, Worker


def sched_form(sched: Sched, now: int, parts: Parts) -> Any:
    if sched.up != "frozen":
        sched = sched._replace(since=now)
    if sched.phase not in ("ends", "second"):
        sched = sched._replace(mark=0)
    if sched.phase not in ("reading", "ends", "requests"):
        sched = sched._replace(newest=0)
    opened = near(sched.opened, now) if sched.phase == "open" else 0
    times = near(sched.since, now), opened
    return sched[:2], sched[3:4], parts.core.form(sched.state, now), sched.epoch, times, flat(sched[7:], now)


def worker_form(worker: Worker, now: int, parts: Parts) -> Any:
    since = near(worker.since, now) if worker.up in ("frozen", "late") else 0
    times = since, *[at and near(at, now) for at in (worker.draining, worker.stalled)]
    rest = flat(worker._replace(since=0, draining=0, stalled=0)[4:], now)
    return worker[:3], parts.worker.form(worker.state, now), times, rest


def asked_form(asked: Asked, now: int, parts: Parts) -> Any:
    form = parts.relay.form(asked.relay, now) if asked.listens else ()
    questions = frozenset([(question, near(at, now)) for question, at in asked.questions])
    answer = flat(asked.answer, now) if asked.phase == "storing" else b""
    told = flat(asked.ending, now), questions, asked.cancel, asked.reads
    return asked[:4], answer, form, asked.text, *told


def flat_form(value: Any, now: int, _: Parts) -> Any:
    return flat(value, now)


def requests_form(requests: tuple[tuple[int, int, str, bytes], ...], now: int, _: Parts) -> Any:
    return tuple([(seq, near(at, now), flat(data, now)) for seq, at, _, data in requests])


def late_form(late: tuple[tuple[int, Message], ...], now: int, _: Parts) -> Any:
    return frozenset([(near(at, now), flat(message, now)) for at, message in late])


def net_form(net: tuple[Message, ...], now: int, _: Parts) -> Any:
    """Order counts within a channel only."""
    loose = frozenset([flat(m, now) for m in net if m[0] not in ("frame", "control")])
    ordered: dict[Op, list[Any]] = {}
    for message in net:
        if message[0] in ("frame", "control"):
            ordered.setdefault(message[:3] if message[0] == "frame" else message[:4], []).append(flat(message, now))
    return loose, frozenset([(channel, tuple(found)) for channel, found in ordered.items()])
