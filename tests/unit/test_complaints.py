"""What is wrong is told once in a while: a sender of nonsense fills no log."""

import msgspec
import prometheus_client
import pytest
from structlog.testing import capture_logs

from contracts.bus import Incoming, complaints
from contracts.bus.complaints import EVERY_S, KINDS_MAX, Seldom, unreadable
from contracts.bus.handlers import contain


def test_a_kind_is_told_at_once_and_then_every_so_often_with_its_count() -> None:
    seldom = Seldom()
    assert [seldom.count("a", now) for now in (0.0, 1.0, 2.0, EVERY_S - 0.1)] == [1, 0, 0, 0]
    assert seldom.count("b", 1.0) == 1
    assert seldom.count("a", EVERY_S) == 4
    assert seldom.count("a", EVERY_S + 1) == 0


def test_kinds_are_bounded_and_the_oldest_goes_first() -> None:
    seldom = Seldom()
    for number in range(KINDS_MAX + 1):
        assert seldom.count(str(number), float(number) / 1000) == 1
    assert seldom.count(str(KINDS_MAX), 1.0) == 0
    assert seldom.count("0", 1.0) == 1


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complaints, "_seldom", Seldom())


@pytest.mark.usefixtures("_fresh")
def test_a_thousand_messages_that_nobody_can_read_are_one_line_without_their_content() -> None:
    class Kind(msgspec.Struct):
        word: str

    with capture_logs() as logs:
        for _ in range(1000):
            data = b'{"word": 1, "secret": "geheim"}'
            message = Incoming("a." + "x" * 5000, "", data, b"", None)  # type: ignore[arg-type]
            try:
                msgspec.json.decode(data, type=Kind)
            except msgspec.MsgspecError as error:
                unreadable("kind_undecodable", message, error)
            unreadable("kind_undecodable", message, ValueError(f"Invalid enum value '{'geheim' * 1000}' - at $.word"))
    assert len(logs) == 1
    counted = {"kind": "kind_undecodable"}
    assert prometheus_client.REGISTRY.get_sample_value("headrace_bus_unreadable_messages_total", counted) == 2000
    assert logs[0]["times"] == 1 and "geheim" not in str(logs) and len(str(logs)) < 1000


@pytest.mark.usefixtures("_fresh")
def test_handlers_that_raise_again_and_again_write_one_traceback() -> None:
    with capture_logs() as logs:
        for number in range(1000):
            contain(f"cancel.v1.m{number}.T", ValueError("x"))
        contain("cancel.v1.m.T", KeyError("another kind"))
    assert [line["event"] for line in logs] == ["bus_handler_failed"] * 2
