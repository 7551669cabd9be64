"""Time that no step of a wall clock moves, and how far clocks are apart."""

import time

import msgspec
import pytest

from contracts.clock import SteadyClock
from contracts.messages.control import StreamOwnerHeartbeat
from contracts.messages.queues import ClockSkew
from scheduler.core import events, views
from scheduler.core.clocks import BEATS, FORGOTTEN_MS, Clocks
from tests.support.scheduler_world import World

HOUR_MS = 3_600_000


def test_a_steady_clock_counts_on_from_what_it_was_told_whatever_the_wall_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monotonic = [5_000]
    monkeypatch.setattr("contracts.clock.monotonic_ms", lambda: monotonic[0])
    clock = SteadyClock(1_800_000_000_000)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert clock.now_ms() == 1_800_000_000_000
    monotonic[0] += 1_234
    assert clock.now_ms() == 1_800_000_001_234


def test_the_least_delayed_of_the_last_heartbeats_tells_how_a_clock_differs() -> None:
    clocks = Clocks()
    for number in range(BEATS):
        now_ms = number * 500
        late_ms = 0 if number == 3 else 2_000  # a full queue, a long pause
        clocks.heard("w-1", now_ms + 30_000 - late_ms, now_ms)
        clocks.heard("gw-1", now_ms + HOUR_MS - 400, now_ms + HOUR_MS)
    assert clocks.ahead_ms() == {"w-1": 30_000, "gw-1": -400}
    assert clocks.apart() == {"w-1": 30_000}
    for number in range(BEATS):  # it was set right
        clocks.heard("w-1", number + 1, number + 1)
    assert clocks.apart() == {}


def test_who_says_nothing_of_its_clock_or_has_gone_is_not_shown() -> None:
    clocks = Clocks()
    clocks.heard("old", 0, 1_000)
    clocks.heard("w-1", 50_000, 1_000)
    assert clocks.ahead_ms() == {"w-1": 49_000}
    clocks.pass_time(1_000 + FORGOTTEN_MS - 1)
    assert clocks.ahead_ms()
    clocks.pass_time(1_000 + FORGOTTEN_MS)
    assert not clocks.ahead_ms()


def test_the_owner_shows_whose_clock_is_apart() -> None:
    world = World()
    beat = msgspec.structs.replace(world.ready_worker().beat(), sent_at_ms=world.now - 30_000)
    world.feed(events.WorkerSeen(beat))
    world.feed(events.StreamOwnerSeen(StreamOwnerHeartbeat(stream_owner="gw-1", sent_at_ms=world.now + 999)))
    world.feed(events.LoopbackSeen(world.now + 30_000))
    assert views.queues(world.core).clocks == [
        ClockSkew(process="s", ahead_ms=30_000),
        ClockSkew(process="w0", ahead_ms=-30_000),
    ]
