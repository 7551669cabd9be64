"""What gateways saw, on its way to the ledger: few messages, bounds at both ends, and nothing that waits for it."""

from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest

from contracts import ids, subjects
from contracts.bus import Bus, Incoming, Unavailable
from contracts.messages.deliveries import DELIVERIES_MAX, Deliveries, Delivery
from gateway import deliveries as reports
from gateway.deliveries import DeliveryReports
from ledger import deliveries as ingest
from ledger.deliveries import DeliveryIngest
from ledger.store import Away, BadValues, Store
from tests.support.polling import metric


def delivery(**changes: Any) -> Delivery:
    return Delivery(**{"request_id": ids.request_id(), "tenant": "t", "outcome": "completed", **changes})


class FakeBus:
    connected = True

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.away = False

    async def publish(self, subject: str, data: bytes) -> None:
        if self.away:
            raise Unavailable("away")
        self.sent.append((subject, len(msgspec.json.decode(data, type=Deliveries).deliveries)))


async def test_a_gateway_tells_of_many_requests_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "WAITING_MAX", DELIVERIES_MAX + 100)
    bus = FakeBus()
    told = DeliveryReports(cast(Bus, bus))
    before = metric("headrace_deliveries_dropped_total")
    for _ in range(DELIVERIES_MAX + 107):
        told.add(delivery())
    assert metric("headrace_deliveries_dropped_total") - before == 7
    bus.away = True
    await told._send()
    assert bus.sent == []
    bus.away = False
    await told._send()
    await told._send()
    assert bus.sent == [(subjects.DELIVERIES, DELIVERIES_MAX), (subjects.DELIVERIES, 100)]


class FakeStore:
    def __init__(self) -> None:
        self.rows: list[Sequence[object]] = []
        self.fails: Exception | None = None

    async def insert_deliveries(self, rows: Sequence[Sequence[object]]) -> None:
        if self.fails:
            raise self.fails
        self.rows += rows


def incoming(*made: Delivery) -> Incoming:
    data = msgspec.json.encode(Deliveries(deliveries=list(made)))
    return Incoming(subjects.DELIVERIES, "", data, b"", cast(Any, None))


async def test_a_ledger_keeps_a_bounded_number_while_clickhouse_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "KEPT_MAX", 5)
    store = FakeStore()
    seen: list[Delivery] = []
    taking = DeliveryIngest(cast(Store, store), seen.extend)
    names = ("headrace_ledger_deliveries_total", "headrace_ledger_deliveries_dropped_total")
    before = [metric(name) for name in names]
    made = [delivery() for _ in range(7)]
    store.fails = Away("away")
    taking.take(incoming(*made))
    await taking._insert()
    store.fails = None
    await taking._insert()
    await taking._insert()
    assert [str(row[2]) for row in store.rows] == [str(int(each.request_id.replace("-", ""), 16)) for each in made[2:]]
    assert seen == made
    assert [metric(name) for name in names] == [before[0] + 5, before[1] + 2]


async def test_what_can_be_no_row_blocks_nobody() -> None:
    store = FakeStore()
    taking = DeliveryIngest(cast(Store, store), lambda told: None)
    taking.take(Incoming(subjects.DELIVERIES, "", b"nope", b"", cast(Any, None)))
    good = delivery()
    taking.take(incoming(delivery(request_id="nope"), delivery(status=-1), delivery(attempt=70_000), good))
    await taking._insert()
    assert len(store.rows) == 1 and store.rows[0][0] == "t"
    store.fails = BadValues("no")
    taking.take(incoming(delivery()))
    await taking._insert()
    store.fails = None
    await taking._insert()
    assert len(store.rows) == 1
