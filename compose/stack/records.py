"""What operators ask of a running stack: live queues, quarantine, the ledger's answers, and the records of prices.

Tenants, keys and models are contracts.registry's. Raises ComposeError where the ledger refuses.
"""

import getpass
import os
import platform
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec

from compose.stack.data_dir import ComposeError
from contracts import subjects, topology
from contracts.audit import Actor
from contracts.bus import Bus
from contracts.messages.attempts import DeadLetter, Quarantined
from contracts.messages.base import Codec, Message
from contracts.messages.records import Price
from contracts.messages.usage import (
    ExplainAnswer,
    ExplainQuery,
    Invoice,
    InvoiceAnswer,
    InvoiceQuery,
    LatencyAnswer,
    LatencyDimension,
    LatencyQuery,
    LatencyRow,
    LedgerAnswer,
    RangeQuery,
    RequestTimes,
    SlowestAnswer,
    SlowestQuery,
    UsageAnswer,
    UsageDimension,
    UsageQuery,
    UsageRow,
)

A = TypeVar("A", bound=LedgerAnswer)
P = TypeVar("P", UsageAnswer, LatencyAnswer)

TIMEOUT_S = 40.0
"""Longer than a ledger lets a question take."""

_PRICE = Codec[Price](Price)
_LETTER = Codec[DeadLetter](DeadLetter)
_QUARANTINED = Codec[Quarantined](Quarantined)


def operator() -> Actor:
    """Who has the operator's credentials of the bus, as the audit trail names it: user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return Actor(name="operator", address=f"{user}@{platform.node()}", via="cli")


async def _ask(bus: Bus, question: str, query: Message, kind: type[A]) -> A:
    data = await bus.request(subjects.usage_all(question), msgspec.json.encode(query), timeout_s=TIMEOUT_S)
    answer = msgspec.json.decode(data, type=kind)
    if answer.error:
        raise ComposeError(f"the ledger says: {answer.error}")
    return answer


async def usage(
    bus: Bus, by: list[UsageDimension], from_at_ms: int, to_at_ms: int, tenant: str | None = None
) -> tuple[list[UsageRow], str]:
    """All rows of the range, and the currency of their amounts."""
    query = UsageQuery(from_at_ms=from_at_ms, to_at_ms=to_at_ms, by=by, tenant=tenant)
    pages = [answer async for answer in _pages(bus, "usage", query, UsageAnswer)]
    return [row for answer in pages for row in answer.rows], pages[-1].currency


async def latency(
    bus: Bus, by: list[LatencyDimension], from_at_ms: int, to_at_ms: int, tenant: str | None = None
) -> list[LatencyRow]:
    """All rows of the range."""
    query = LatencyQuery(from_at_ms=from_at_ms, to_at_ms=to_at_ms, by=by, tenant=tenant)
    return [row async for answer in _pages(bus, "latency", query, LatencyAnswer) for row in answer.rows]


async def _pages(bus: Bus, question: str, query: RangeQuery, kind: type[P]) -> AsyncIterator[P]:
    """All pages of an answer, one at least."""
    offset, more = 0, True
    while more:
        answer = await _ask(bus, question, msgspec.structs.replace(query, offset=offset), kind)
        yield answer
        offset += len(answer.rows)
        more = answer.has_more and bool(answer.rows)


async def invoice(bus: Bus, tenant: str, month: str) -> Invoice:
    answer = await _ask(bus, "invoice", InvoiceQuery(tenant=tenant, month=month), InvoiceAnswer)
    if answer.invoice is None:
        raise ComposeError("the ledger answered without an invoice")
    return answer.invoice


async def explain(bus: Bus, request_id: str) -> ExplainAnswer:
    return await _ask(bus, "explain", ExplainQuery(request_id=request_id), ExplainAnswer)


async def slowest(bus: Bus, query: SlowestQuery) -> list[RequestTimes]:
    """The slowest first."""
    return (await _ask(bus, "slowest", query, SlowestAnswer)).rows


async def dead_letters(bus: Bus) -> list[DeadLetter]:
    """Events that the ledger refused, oldest first."""
    return [
        _LETTER.decode(each.data) async for each in bus.jetstream.read(topology.DEAD_LETTERS, subjects.DEAD_ATTEMPTS)
    ]
