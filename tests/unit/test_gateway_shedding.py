"""When a gateway takes nothing new, by a virtual clock."""

from typing import cast

import pytest

from contracts.service.vitals import Vitals
from gateway.intake import shedding
from gateway.intake.shedding import CALM_S, EXPECTED_S_BUSY, WAITED_S_MAX, WAITING_MAX, Shedding
from gateway.intake.turnstile import Turnstile


class Gateway:
    """Its state, as the rule sees it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.late = False
        self.late_for_s = 0.0
        self.waiting = 0
        self.wait_s = 0.0
        self.came = 0
        self._shedding = Shedding(cast(Vitals, self), cast(Turnstile, self))

    def __len__(self) -> int:
        return self.waiting

    def waited_s(self) -> float:
        return self.wait_s

    def expected_s(self) -> float:
        return self.wait_s

    def comes(self) -> None:
        self.came += 1

    def refuses(self, wait_s: float, *, after_s: float = 0.0) -> bool:
        self.now += after_s
        self.wait_s = wait_s
        came = self.came
        refuses = self._shedding.refusing
        assert self._shedding.admits() is not refuses and (self.came > came) is not refuses
        return refuses


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Gateway:
    made = Gateway()
    monkeypatch.setattr(shedding.time, "monotonic", lambda: made.now)
    return made


def test_a_burst_is_let_in(gateway: Gateway) -> None:
    gateway.waiting = WAITING_MAX - 1
    assert not any(gateway.refuses(tenth / 10 * WAITED_S_MAX, after_s=0.1) for tenth in range(10))


def test_under_steady_overload_nobody_waits_long_before_and_after_each_refusal(gateway: Gateway) -> None:
    assert gateway.refuses(WAITED_S_MAX + 0.1)
    assert gateway.refuses(2 * EXPECTED_S_BUSY, after_s=0.5), "what waits is still no burst"
    assert not gateway.refuses(EXPECTED_S_BUSY / 2, after_s=0.5), "but who waits little is let in"
    assert gateway.refuses(2 * EXPECTED_S_BUSY, after_s=CALM_S - 1)
    assert not gateway.refuses(2 * EXPECTED_S_BUSY, after_s=CALM_S + 1), "calm again, a burst is one"


@pytest.mark.parametrize("how", ["late", "waiting"])
def test_who_is_late_or_full_refuses_whatever_the_wait(gateway: Gateway, how: str) -> None:
    setattr(gateway, how, {"late": True, "waiting": WAITING_MAX}[how])
    assert gateway.refuses(0.0)
    setattr(gateway, how, 0)
    assert not gateway.refuses(0.0)
