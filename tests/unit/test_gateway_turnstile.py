"""A few requests a turn of the event loop, in their order."""

import asyncio

import pytest

from gateway.intake.turnstile import A_TURN, PASS_S, Turnstile


async def test_some_pass_each_turn_in_order_and_others_have_theirs_between() -> None:
    turnstile, seen = Turnstile(), list[object]()

    async def request(number: int) -> None:
        await turnstile.enter()
        seen.append(number)

    async def stream() -> None:
        for _ in range(10):
            seen.append("token")
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(request(number)) for number in range(5 * A_TURN)]
    await asyncio.gather(stream(), *tasks)
    assert [each for each in seen if each != "token"] == list(range(5 * A_TURN))
    between = "".join("t" if each == "token" else "." for each in seen)
    assert "." * (A_TURN + 1) not in between, between
    assert len(turnstile) == 0 and turnstile.waited_s() == 0.0


async def test_who_leaves_takes_nobodys_turn() -> None:
    turnstile = Turnstile()
    waiting = [asyncio.create_task(turnstile.enter()) for _ in range(3 * A_TURN)]
    await asyncio.sleep(0)
    for task in waiting[:-1]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert waiting[-1].done() and not waiting[-1].cancelled() and len(turnstile) == 0


async def test_what_is_expected_counts_those_who_are_yet_to_come_and_how_fast_others_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turnstile, now = Turnstile(), 1000.0
    monkeypatch.setattr("gateway.intake.turnstile.time.monotonic", lambda: now)
    for _ in range(100):
        turnstile.comes()
    assert turnstile.expected_s() == pytest.approx(100 * PASS_S), "all of one turn of the loop, before one is there"
    tasks = [asyncio.create_task(turnstile.enter()) for _ in range(100)]
    await asyncio.sleep(0)
    assert turnstile.expected_s() == pytest.approx(100 * PASS_S), "nobody counts twice"
    while len(turnstile):
        now += A_TURN * 10 * PASS_S
        before = len(turnstile)
        await asyncio.sleep(0)
        assert len(turnstile) >= before - A_TURN
    await asyncio.gather(*tasks)
    assert turnstile.expected_s() == 0.0
    turnstile.comes()
    assert turnstile.expected_s() == pytest.approx(10 * PASS_S, rel=0.1), "as long as each of them took"
    now += 3600
    await turnstile.enter()
    turnstile.comes()
    assert turnstile.expected_s() < 10 * PASS_S, "who waited for nobody tells of no queue"
