"""``headrace pools``: how many workers each model should have, and why."""

from typing import TYPE_CHECKING, Annotated

import typer

from compose.cli.common import DataDirOption, JsonOption, on_bus, show, table
from compose.stack.data_dir import Target

if TYPE_CHECKING:
    from contracts.bus import Bus
    from contracts.messages.queues import Replicas

BOUNDS = ("throughput", "kv_cache", "slots", "running")


def pools(
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Workers that each model should have, by its requests' tokens; what decides, and what it has."""
    from contracts import operations, registry

    async def ask(bus: "Bus", _: Target) -> "list[Replicas]":
        records = [await registry.model(bus, model)] if model is not None else await registry.models(bus)
        return [(await operations.queue(bus, record.name)).replicas for record in records]

    answers = on_bus(data_dir, ask)
    rows = [
        (
            it.model,
            it.desired if it.known else "-",
            it.reason,
            it.ready,
            it.loading,
            it.leaving,
            *(f"{it.needed[bound]:.2f}" if bound in it.needed else "-" for bound in BOUNDS),
            f"{it.warm_up_ms / 1000:.1f}" if it.warm_up_ms else "-",
        )
        for it in answers
    ]
    head = ("model", "desired", "because", "ready", "loading", "leaving", *BOUNDS, "warm-up s")
    show(answers, table(head, rows), as_json=as_json)
