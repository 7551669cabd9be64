"""Records of prices, by model, version, tier and the UTC day from which they hold; all in one currency."""

from datetime import UTC, datetime

from contracts import currency, subjects, topology
from contracts.bus import Bus
from contracts.errors import HeadraceError
from contracts.messages.base import Codec
from contracts.messages.records import Price
from contracts.registry.base import Changed, check_name, encoded
from contracts.registry.model_records import version as version_record

_PRICE = Codec[Price](Price)


async def prices(bus: Bus) -> list[Price]:
    """By model, version, tier and day."""
    found = [_PRICE.decode(entry.value) for entry in (await bus.kv.all(topology.PRICES)).values()]
    return sorted(found, key=_place)


def check_price(price: Price, present: list[Price]) -> None:
    """Raises HeadraceError for what the ledger could not count with."""
    check_name("model name", price.model)
    try:
        currency.digits_of(price.currency)
    except ValueError as error:
        raise HeadraceError("invalid_request", str(error), param="currency") from error
    if others := {each.currency for each in present} - {price.currency}:
        raise HeadraceError("invalid_request", f"prices are in {others.pop()}; all have one currency", param="currency")


def check_day(text: str, now_ms: int, *, backdate: bool) -> str:
    """The day as it is kept; raises HeadraceError for none, and for one that has begun."""
    try:
        day = datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).date()
    except ValueError as error:
        raise HeadraceError("invalid_request", f"valid_from: {error}", param="valid_from") from error
    if day <= datetime.fromtimestamp(now_ms / 1000, UTC).date() and not backdate:
        raise HeadraceError(
            "invalid_request",
            f"{day} has begun, and what was used since would cost otherwise: say backdate (--backdate) if so meant",
            param="valid_from",
        )
    return day.isoformat()


async def put_price(bus: Bus, price: Price) -> Changed[Price]:
    """Keep one; that with the same model, version, tier and day is replaced. Raises HeadraceError."""
    present = await prices(bus)
    check_price(price, present)
    if price.version:
        await version_record(bus, price.model, price.version)
    of_version = f".{subjects.encode(price.version)}" if price.version else ""
    key = f"{subjects.encode(price.model)}.{price.tier}.{price.valid_from}{of_version}"
    before = next((each for each in present if _place(each) == _place(price)), None)
    await bus.kv.put(topology.PRICES, key, encoded(_PRICE, price))
    return Changed(before, price)


def _place(price: Price) -> tuple[str, str, str, str]:
    return price.model, price.version, price.tier, price.valid_from
