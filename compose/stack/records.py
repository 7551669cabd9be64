"""What operators ask of a running stack: live queues, quarantine, the ledger's answers, and the records of prices.

Tenants, keys and models are contracts.registry's. Raises ComposeError where the ledger refuses.
"""

import getpass
import os
import platform
from collections.abc import AsyncIterator
from decimal import Decimal, InvalidOperation
from typing import TypeVar

import msgspec

from compose.stack.data_dir import ComposeError
from contracts import audit, subjects, topology
from contracts.audit import Actor
from contracts.bus import Bus
from contracts.messages.attempts import DeadLetter, Quarantined
from contracts.messages.base import Codec, Message
from contracts.messages.queues import QueueAnswer
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
from contracts.registry import Changed, check_name
from ledger.core import money

A = TypeVar("A", bound=LedgerAnswer)
P = TypeVar("P", UsageAnswer, LatencyAnswer)

TIMEOUT_S = 40.0
"""Longer than a ledger lets a question take."""

_PRICE = Codec[Price](Price)
_LETTER = Codec[DeadLetter](DeadLetter)
_QUARANTINED = Codec[Quarantined](Quarantined)
_QUEUE_ANSWER = Codec[QueueAnswer](QueueAnswer)


def operator() -> Actor:
    """Who has the operator's credentials of the bus, as the audit trail names it: user and host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        user = str(os.getuid())
    return Actor(name="operator", address=f"{user}@{platform.node()}", via="cli")


async def queue(bus: Bus, model: str) -> QueueAnswer:
    """Live queues of one model, from its scheduler."""
    return _QUEUE_ANSWER.decode(await bus.request(subjects.queues(model), b"{}"))


async def quarantined(bus: Bus, request_id: str = "*") -> list[Quarantined]:
    """Requests in quarantine, oldest first; all of them, or the one."""
    subject = _quarantine_subject(request_id)
    return [_QUARANTINED.decode(message.data) async for message in bus.jetstream.read(topology.QUARANTINE, subject)]


async def drop_quarantined(bus: Bus, request_id: str) -> bool:
    """Forget one; False when it is not there."""
    subject = _quarantine_subject(request_id)
    async with audit.recorded(bus, operator(), "quarantine.drop", request_id):
        return await bus.jetstream.purge(topology.QUARANTINE, subject) > 0


def _quarantine_subject(request_id: str) -> str:
    """Over all models; ``*`` for every request."""
    token = request_id if request_id == "*" else subjects.encode(check_name("request id", request_id))
    return f"quarantine.v1.*.{token}"


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


async def set_prices(bus: Bus, made: list[Price]) -> None:
    """Keep these; one with the same model, tier and day is replaced."""
    for currency in {price.currency for price in made}:
        try:
            money.digits_of(currency)
        except ValueError as error:
            raise ComposeError(str(error)) from error
    present = await prices(bus)
    for price in made:
        check_name("model name", price.model)
        others = {each.currency for each in present} - {price.currency}
        if others:
            raise ComposeError(f"prices are in {others.pop()}; all have one currency")
        key = f"{subjects.encode(price.model)}.{price.tier}.{price.valid_from}"
        before = next((each for each in present if _place(each) == _place(price)), None)
        async with audit.recorded(bus, operator(), "prices.set", price.model, price) as record:
            await bus.kv.put(topology.PRICES, key, _PRICE.encode(price))
            record.changed = Changed(before, price)


def _place(price: Price) -> tuple[str, str, str]:
    return price.model, price.tier, price.valid_from


async def prices(bus: Bus) -> list[Price]:
    """By model, tier and day."""
    found = [_PRICE.decode(entry.value) for entry in (await bus.kv.all(topology.PRICES)).values()]
    return sorted(found, key=_place)


def micros(text: str) -> int:
    """A price such as ``0.15`` in whole millionths; raises ValueError."""
    try:
        number = Decimal(text) * 1_000_000
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is not a number") from error
    if not (number.is_finite() and 0 <= number <= 10**12 and number == number.to_integral_value()):
        raise ValueError(f"the price {text} is not from 0 to 1000000 with at most 6 digits after the point")
    return int(number)


def shown(micro: int) -> str:
    """Millionths as people write them."""
    return f"{Decimal(micro) / 1_000_000:f}"
