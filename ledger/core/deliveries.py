"""A gateway's word about a request as a row, and back; pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from contracts.messages.deliveries import Delivery
from ledger.core.rows import UINT32_MAX, request_number, requested_at_ms

COLUMNS = (
    "tenant",
    "requested_at",
    "request_id",
    *[name for name in Delivery.__struct_fields__ if name not in ("tenant", "request_id")],
)
"""Of the table, in its order."""
SHOWN = tuple(name for name in COLUMNS if name != "requested_at")
_UINT16_MAX = (1 << 16) - 1
_BOUNDS = {"status": _UINT16_MAX, "attempt": _UINT16_MAX, "prompt_tokens": UINT32_MAX}


def row_of(delivery: Delivery) -> tuple[object, ...] | None:
    """Its row; None when it says something impossible."""
    try:
        number = request_number(delivery.request_id)
    except ValueError:
        return None
    if any(not 0 <= getattr(delivery, name) <= most for name, most in _BOUNDS.items()):
        return None
    values = msgspec.structs.asdict(delivery) | {"request_id": number, "requested_at": requested_at_ms(number)}
    return tuple(values[name] for name in COLUMNS)


def delivery_of(values: Sequence[Any]) -> Delivery:
    """The delivery of a row, whose SHOWN columns these are."""
    fields = dict(zip(SHOWN, values, strict=True))
    return Delivery(**fields | {"request_id": str(fields["request_id"])})
