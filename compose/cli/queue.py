"""``headrace queue``: the live queues."""

from typing import TYPE_CHECKING, Annotated

import typer

from compose.cli.common import DataDirOption, JsonOption, on_bus, show, table
from compose.stack.data_dir import Target

if TYPE_CHECKING:
    from contracts.bus import Bus
    from contracts.messages.queues import QueueAnswer


def queue(
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Live queues of each model, by tenant."""
    from contracts import operations, registry

    async def ask(bus: "Bus", _: Target) -> "list[QueueAnswer]":
        names = [model] if model is not None else [record.name for record in await registry.models(bus)]
        return [await operations.queue(bus, name) for name in names]

    answers = on_bus(data_dir, ask)
    show(answers, "\n".join(map(_text, answers)), as_json=as_json)


def _text(answer: "QueueAnswer") -> str:
    head = (
        f"{answer.model}: {answer.waiting} waiting, {answer.running} running, "
        f"{answer.reserved_tokens} tokens reserved, {len(answer.workers)} workers\n"
    )
    for clock in answer.clocks:
        direction = "ahead of" if clock.ahead_ms > 0 else "behind"
        head += f"the clock of {clock.process} is {abs(clock.ahead_ms) / 1000:.1f} s {direction} the bus's: set it\n"
    for worker in answer.workers:
        if worker.reason:
            head += f"{worker.worker} ({worker.version}) is {worker.state}: {worker.reason}\n"
    return head + table(
        ("tenant", "waiting", "tokens", "running", "reserved", "served", "oldest_ms"),
        [
            (
                line.tenant,
                line.waiting,
                line.waiting_tokens,
                line.running,
                line.reserved_tokens,
                f"{line.served_counter:.0f}",
                line.oldest_wait_ms,
            )
            for line in answer.tenants
        ],
    )
