"""Issued invoices: the bucket INVOICES, where each is written once and never again."""

import structlog

from contracts import subjects, topology
from contracts.bus import Bus, WrongSequence
from contracts.messages.base import Codec
from contracts.messages.usage import Invoice

log = structlog.get_logger(__name__)

_invoices: Codec[Invoice] = Codec(Invoice)


class Invoices:
    """Of all tenants. Methods raise BusError."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def of(self, tenant: str) -> dict[str, Invoice]:
        """The tenant's issued invoices, by month."""
        entries = await self._bus.kv.all(topology.INVOICES, f"{subjects.encode(tenant)}.*")
        made = [_invoices.decode(entry.value) for entry in entries.values()]
        return {each.month: each for each in made}

    async def issue(self, made: Invoice) -> Invoice:
        """Issue it, unless another ledger was first; what was issued."""
        key = f"{subjects.encode(made.tenant)}.{made.month}"
        try:
            await self._bus.kv.create(topology.INVOICES, key, _invoices.encode(made))
        except WrongSequence as error:
            if error.found is None:
                raise
            return _invoices.decode(error.found.data)
        log.info("invoice_issued", tenant=made.tenant, month=made.month, lines=len(made.lines))
        return made
