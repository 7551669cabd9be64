"""``headrace top`` as a screen, for any width and height: pure.

What nobody knows is ``?``, and what has no room is counted.
"""

import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from compose.stack.terminal import printable
from compose.watch.look import Failure, Rolling, Seen
from contracts.live import LiveModel, LiveWorker
from contracts.messages.queues import TenantQueue

WIDE, NARROW = 100, 60
"""Characters from which on all columns are there, and below which only those without which it says nothing."""
ROWS_MIN = 3
"""Of workers, tenants and failures, however low the screen."""
_COLORS = {
    "ready": "green",
    "starting": "cyan",
    "held": "yellow",
    "draining": "yellow",
    "engine_down": "red",
    "failed": "red",
}


def screen(seen: Seen, width: int, height: int | None = None) -> RenderableType:
    """``height`` None: all rows, as many as there are."""
    models, failures = seen.live.models, seen.failures
    most = _most(seen, height)
    lines: list[RenderableType] = [_head(seen, quits=height is not None and width >= NARROW)]
    for model in models:
        lines.append(_model(model, width))
        lines += [_rollout(each) for each in seen.rollouts if each.model == model.model]
        workers = [(pool.version, worker) for pool in model.pools for worker in pool.workers]
        if workers:
            lines += _cut(_workers(workers[:most], width), len(workers) - most, "workers")
        if model.tenants:
            tenants = sorted(model.tenants, key=lambda each: (-each.waiting, -each.running, each.tenant))
            lines += _cut(_tenants(tenants[:most], width), len(tenants) - most, "tenants")
    if failures:
        lines += [Text("last failures", style="bold"), _failures(failures[:most], width)]
    return Group(*lines)


def _most(seen: Seen, height: int | None) -> int:
    """Rows of each table, so that all of them fit."""
    most = max(
        [len(seen.failures), *(len(model.tenants) for model in seen.live.models)]
        + [sum(len(pool.workers) for pool in model.pools) for model in seen.live.models]
    )
    while height is not None and most > ROWS_MIN and _rows(seen, most) > height:
        most -= 1
    return most


def _rows(seen: Seen, most: int) -> int:
    """Lines of the screen with at most ``most`` in each table: heads, rows, and a line for what is cut."""
    tables = [len(seen.failures)]
    for model in seen.live.models:
        tables += [sum(len(pool.workers) for pool in model.pools), len(model.tenants)]
    rows = sum(1 + min(rows, most) + (rows > most) for rows in tables if rows)
    return 1 + len(seen.live.models) + len(seen.rollouts) + bool(seen.failures) + rows


def _head(seen: Seen, *, quits: bool) -> Text:
    at = time.strftime("%H:%M:%S", time.gmtime(seen.live.at_ms / 1000))
    text = Text("headrace top", style="bold", no_wrap=True)
    return text.append(f"  {at}Z{'  q quits' if quits else ''}", style="dim")


def _model(model: LiveModel, width: int) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(printable(model.model), style="bold reverse")
    text.append(printable(f" @{model.stable}"))
    if model.error:
        return text.append(printable(f"  {model.error}"), style="red")
    text.append(f"  {_number(model.waiting)} waiting", style="yellow" if model.waiting else "")
    if model.oldest_wait_ms:
        text.append(f" (for {model.oldest_wait_ms / 1000:.1f} s)")
    text.append(f"  {_number(model.running)} running")
    rates = [pool.output_tokens_per_s for pool in model.pools]
    known = [rate for rate in rates if rate is not None]
    text.append(f"  {_number(sum(known) if known else None)} tokens/s")
    ready, workers = sum(pool.ready for pool in model.pools), sum(len(pool.workers) for pool in model.pools)
    text.append(f"  {ready}/{workers} workers ready", style="" if ready and ready == workers else "red")
    if width >= WIDE:
        text.append(f"  {_number(model.reserved_tokens)} tokens reserved")
    for clock in model.clocks[:1]:
        text.append(f"  clock of {printable(clock.process)} is {clock.ahead_ms / 1000:+.1f} s", style="red")
    return text


def _rollout(rolling: Rolling) -> Text:
    phase = f"{rolling.phase or '?'}{', paused' if rolling.paused else ''}"
    share = "?" if rolling.share is None else f"{rolling.share * 100:g}"
    style = {"stopped": "red", "aborted": "yellow", "promoted": "green"}.get(rolling.phase or "", "cyan")
    text = f"  roll-out {rolling.stable or '?'} > {rolling.to}  {phase}  {share} %  {rolling.why}"
    return Text(printable(text.rstrip()), style=style, no_wrap=True, overflow="ellipsis")


def _table(*columns: str) -> Table:
    """``>name``: numbers, and ``=name``: what is never cut; the others are names, which are when there is no room."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", width=1)
    for name in columns:
        whole, right = name[0] in ">=", name.startswith(">")
        table.add_column(name.lstrip(">="), justify="right" if right else "left", no_wrap=whole)
    return table


def _name(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _workers(rows: Sequence[tuple[str, LiveWorker]], width: int) -> Table:
    bar = 12 if width >= WIDE else 6
    if width < NARROW:
        table = _table("worker", "state", ">slots", ">KV")
        for _, worker in rows:
            slots, kv = f"{worker.running}/{worker.slots}", _percent(worker.kv_tokens_used, worker.kv_tokens)
            table.add_row("", _name(worker.worker), _state(worker, width), slots, kv)
        return table
    wide = (">prompt/s", ">waiting") if width >= WIDE else ()
    table = _table("worker", "version", "state", "=slots", "=KV", ">tokens/s", *wide)
    for version, worker in rows:
        cells = [
            _name(worker.worker),
            _name(version),
            _state(worker, width),
            _bar(worker.running, worker.slots, bar),
            _bar(worker.kv_tokens_used, worker.kv_tokens, bar, percent=True),
            _number(worker.output_tokens_per_s),
        ]
        if wide:
            cells += [_number(worker.prompt_tokens_per_s), _number(worker.waiting)]
        table.add_row("", *cells)
    return table


def _state(worker: LiveWorker, width: int) -> Text:
    said = f"{worker.state}: {worker.reason}" if worker.reason and width >= WIDE else worker.state
    return _name(said[:40], _COLORS[worker.state])


def _tenants(rows: Sequence[TenantQueue], width: int) -> Table:
    narrow = width < NARROW
    table = _table("tenant", ">waiting", ">running", *(() if narrow else (">tokens waiting", ">reserved", ">oldest")))
    for each in rows:
        cells = [_name(each.tenant), _number(each.waiting), _number(each.running)]
        if not narrow:
            oldest = f"{each.oldest_wait_ms / 1000:.1f} s" if each.waiting else ""
            cells += [_number(each.waiting_tokens), _number(each.reserved_tokens), Text(oldest)]
        table.add_row("", *cells)
    return table


def _failures(rows: Sequence[Failure], width: int) -> Table:
    """The request's id is never cut: it is what ``headrace explain`` is asked with."""
    narrow, wide = width < NARROW, width >= WIDE
    table = _table("=at", *(() if narrow else ("=request",)), "model", "what", *(("tenant", "worker") if wide else ()))
    for each in rows:
        at = time.strftime("%H:%M:%S", time.gmtime(each.at_ms / 1000))
        what = _name(each.code or each.outcome, "red")
        ids = [] if narrow else [_name(each.request_id)]
        table.add_row(
            "", at, *ids, _name(each.model), what, *([_name(each.tenant), _name(each.worker)] if wide else [])
        )
    return table


def _cut(table: Table, left: int, what: str) -> list[RenderableType]:
    return [table, Text(f"   and {left} more {what}", style="dim", no_wrap=True)] if left > 0 else [table]


def _bar(used: int, whole: int, cells: int, *, percent: bool = False) -> Text:
    if not whole:
        return Text("?")
    filled = min(cells, -(-used * cells // whole))
    full = used / whole
    text = Text("█" * filled, style="red" if full >= 0.95 else "yellow" if full >= 0.8 else "green")
    text.append("░" * (cells - filled), style="dim")
    return text.append(f" {_percent(used, whole)}" if percent else f" {used}/{whole}", style="default")


def _percent(used: int, whole: int) -> str:
    return f"{used / whole:.0%}" if whole else "?"


def _number(value: float | None) -> Text:
    return Text("?" if value is None else f"{value:,.0f}")
