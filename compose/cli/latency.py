"""``headrace latency``: how long requests wait and run."""

from typing import Annotated, Any

from compose.cli.asked import FromOption, TenantOption, ToOption, by_option, month_or_range, note_if_none
from compose.cli.common import DataDirOption, JsonOption, on_bus, show, table
from contracts.messages.usage import LatencyDimension


def latency(
    by: Annotated[list[Any] | None, by_option(LatencyDimension, "model")] = None,
    tenant: TenantOption = None,
    start: FromOption = None,
    end: ToOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quantiles of queue wait, first token, inter-token pause and whole answer, in milliseconds."""
    from compose.stack import records

    dimensions: list[LatencyDimension] = list(dict.fromkeys(by or ["model"]))
    from_at_ms, to_at_ms = month_or_range(start, end)
    rows = on_bus(data_dir, lambda bus, _: records.latency(bus, dimensions, from_at_ms, to_at_ms, tenant))
    note_if_none(rows, from_at_ms, to_at_ms)
    lines = [
        (*(getattr(row, name) for name in dimensions), span, found.count, found.p50, found.p90, found.p95, found.p99)
        for row in rows
        for span, found in (
            ("queue wait", row.queue_wait_ms),
            ("first token", row.first_token_ms),
            ("inter-token", row.inter_token_ms),
            ("end to end", row.end_to_end_ms),
        )
    ]
    show(rows, table((*dimensions, "span", "count", "p50", "p90", "p95", "p99"), lines), as_json=as_json)
