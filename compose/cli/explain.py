"""``headrace explain``: the story of one request and where its time went; ``--slowest``: which ones to look at."""

from typing import Annotated

import typer

from compose.cli.asked import FromHourOption, TenantOption, ToOption
from compose.cli.common import DataDirOption, JsonOption, on_bus, show, table
from contracts import clock
from contracts.messages.usage import RequestTimes, SlowestQuery

BAR_CELLS = 40
HOUR_MS = 3_600_000


def explain(
    request_id: Annotated[
        str | None, typer.Argument(metavar="ID", help="Of the answer (header or body), or the caller's own.")
    ] = None,
    slowest: Annotated[
        bool, typer.Option("--slowest", help="The slowest requests instead, by tenant and model: of the last hour.")
    ] = False,
    tenant: TenantOption = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    start: FromHourOption = None,
    end: ToOption = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="With --slowest: how many of each tenant and model.")] = 5,
    first_token: Annotated[
        bool, typer.Option("--first-token", help="With --slowest: by the time to the first token.")
    ] = False,
    failed: Annotated[
        bool, typer.Option("--failed", help="With --slowest: those that failed instead, the newest first.")
    ] = False,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """What became of a request: attempts, times, worker, version, outcome, what is billed, and why it took so long."""
    from compose.stack import records

    if slowest == (request_id is not None):
        raise typer.BadParameter("give either the ID of a request or --slowest")
    if request_id is not None:
        found = on_bus(data_dir, lambda bus, _: records.explain(bus, request_id))
        bar = ["", *waterfall(found.times), "", found.times.why] if found.times else []
        show(found, "\n".join([*found.text, *bar]), as_json=as_json)
        return
    until = end if end is not None else clock.now_ms()
    query = SlowestQuery(
        from_at_ms=start if start is not None else until - HOUR_MS,
        to_at_ms=until,
        tenant=tenant,
        model=model,
        order="failed" if failed else "first_token" if first_token else "total",
        limit=limit,
    )
    rows = on_bus(data_dir, lambda bus, _: records.slowest(bus, query))
    lines = [(each.tenant, each.model, each.request_id, each.outcome, each.why) for each in rows]
    show(rows, table(("tenant", "model", "request", "outcome", "why"), lines), as_json=as_json)


def waterfall(times: RequestTimes) -> list[str]:
    """A line for each phase, its bar where it lies in the whole; what nobody knows is shown as ``?``."""
    lines, past = [], 0.0
    whole = max(times.total_ms, sum(phase.ms or 0.0 for phase in times.phases), 0.001)
    for phase in times.phases:
        if phase.ms is None:
            lines.append(f"{phase.name:<10} {'?':>10}")
            continue
        first, last = (round(at / whole * BAR_CELLS) for at in (past, past + phase.ms))
        past += phase.ms
        bar = " " * min(first, BAR_CELLS - 1) + "█" * (last - first) if last > first else ""
        lines.append(f"{phase.name:<10} {phase.ms / 1000:>8.3f} s  {bar}".rstrip())
    return lines
