"""``headrace rollout``: give a new version a growing share of a model's requests, as long as it is not worse."""

import math
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compose.cli.common import DataDirOption, JsonOption, administer, instant, names, on_bus, show
from compose.stack.data_dir import ComposeError, Target

if TYPE_CHECKING:
    from rich.console import RenderableType

    from contracts.bus import Bus
    from contracts.messages.rollouts import Measure, RolloutPlan, Wanted
    from contracts.registry import ShownRollout

app = typer.Typer(no_args_is_help=True, help="Roll-outs of new versions, judged while they run.")

_SPAN = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?\Z", re.ASCII)
_UNIT_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, None: 1_000}

ModelArgument = Annotated[str, typer.Argument(help="Name of the model.")]


@app.command("start")
def rollout_start(
    model: ModelArgument,
    to: Annotated[str, typer.Option("--to", help="The new version, which must be published.")],
    steps: Annotated[str, typer.Option(help="Shares in percent; 100 makes it the stable version.")] = "1,5,25,50,100",
    hold: Annotated[str, typer.Option(help="Shortest time of a step, such as 10m or 30s.")] = "10m",
    by: Annotated[str, typer.Option(help="What keeps its side: request, tenant or conversation.")] = "request",
    tenants: Annotated[str | None, typer.Option(help="Only these, with commas.")] = None,
    shadow: Annotated[float, typer.Option(help="Percent of requests that are copied to it before; 0: none.")] = 20.0,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start a roll-out."""
    from contracts.forms import NewRollout
    from contracts.messages.rollouts import By

    chosen: By
    match by:
        case "request" | "tenant" | "conversation":
            chosen = by
        case _:
            raise ComposeError(f"--by is request, tenant or conversation, not {by}")
    form = NewRollout(
        to=to,
        steps=tuple(_number(part, "--steps") for part in names(steps)),
        hold_ms=_span_ms(hold),
        by=chosen,
        tenants=tuple(names(tenants or "")),
        shadow=shadow,
    )
    plan = administer(data_dir, lambda do: do.start_rollout(model, form))
    show(plan, f"roll-out of {model} to {plan.to}: {_steps(plan)}", as_json=as_json)


@app.command("status")
def rollout_status(
    model: Annotated[str | None, typer.Argument(help="Name of the model; all without it.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Until it is over.")] = False,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """How far it is, the evidence by criterion, and what it waits for."""
    from contracts import registry

    async def look(bus: "Bus", _: Target) -> "list[ShownRollout]":
        return await registry.rollouts(bus) if model is None else [await registry.rollout(bus, model)]

    found = on_bus(data_dir, look)
    if as_json:
        show(found if model is None else found[0], "", as_json=True)
        return
    from rich.console import Console, Group
    from rich.live import Live

    console = Console(soft_wrap=not sys.stdout.isatty())
    if not found:
        print("no roll-outs")
    elif not watch:
        for each in found:
            console.print(_drawn(each))
    else:
        with Live(Group(*map(_drawn, found)), console=console, auto_refresh=False) as live:
            while any(each.open for each in found):
                time.sleep(1)
                found = on_bus(data_dir, look)
                live.update(Group(*map(_drawn, found)), refresh=True)


@app.command("pause")
def rollout_pause(model: ModelArgument, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Stay at the present share; the judge goes on watching."""
    _want(model, "pause", "is paused", data_dir, as_json=as_json)


@app.command("resume")
def rollout_resume(model: ModelArgument, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Go on with a paused one."""
    _want(model, "run", "goes on", data_dir, as_json=as_json)


@app.command("promote")
def rollout_promote(model: ModelArgument, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Make the new version the stable one now, whatever the evidence."""
    _want(model, "promote", "is promoted: its version becomes the stable one", data_dir, as_json=as_json)


@app.command("abort")
def rollout_abort(model: ModelArgument, data_dir: DataDirOption = None, as_json: JsonOption = False) -> None:
    """Give everything back to the stable version; what runs on the new one stays to its end."""
    _want(model, "abort", "is aborted", data_dir, as_json=as_json)


def _want(model: str, wanted: "Wanted", became: str, data_dir: Any, *, as_json: bool) -> None:
    from contracts.forms import RolloutChange

    plan = administer(data_dir, lambda do: do.change_rollout(model, RolloutChange(wanted=wanted)))
    show(plan, f"the roll-out of {model} to {plan.to} {became}", as_json=as_json)


def _span_ms(text: str) -> int:
    """``10m`` in milliseconds; seconds without a unit. Raises ComposeError."""
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        raise ComposeError(f"--hold is a time such as 10m, 30s or 2h, not {text!r}")
    return round(float(found[1]) * _UNIT_MS[found[2]])


def _number(text: str, option: str) -> float:
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ComposeError(f"{option}: {text!r} is no number")
    return number


def _steps(plan: "RolloutPlan") -> str:
    shares = " > ".join(f"{step:g} %" for step in plan.steps)
    shadow = f"copies of {plan.shadow:g} % > " if plan.shadow else ""
    whose = f" of {', '.join(plan.tenants)}" if plan.tenants else ""
    return f"{shadow}{shares}{whose} by {plan.by}, each for {plan.hold_ms / 1000:g} s at least"


_SAID = {
    "shadow": ("cyan", "copies only"),
    "live": ("cyan", "live"),
    "promoting": ("cyan", "promoting"),
    "promoted": ("green", "promoted"),
    "aborted": ("yellow", "aborted"),
    "stopped": ("red", "stopped by the judge"),
}


def _drawn(shown: "ShownRollout") -> "RenderableType":
    """One roll-out, for people."""
    from rich.console import Group
    from rich.markup import escape
    from rich.text import Text

    plan, progress = shown.plan, shown.progress
    if progress is None:
        return Text(f"{plan.model}: to {plan.to}, not begun: no scheduler has taken it up yet")
    color, phase = _SAID[progress.phase]
    if progress.paused:
        color, phase = "yellow", f"{phase}, paused"
    served = sum(step.canary for step in progress.evidence), sum(step.stable for step in progress.evidence)
    lines: list[RenderableType] = [
        Text.from_markup(
            f"[bold]{escape(plan.model)}[/]: {escape(progress.stable)} > {escape(plan.to)}  [{color}]{phase}[/]"
            + (f" since {instant(progress.ended_at_ms)}" if progress.ended_at_ms else "")
        ),
        Text(f"  steps    {_steps(plan)}"),
        Text(f"  now      {progress.share * 100:g} % to {plan.to}, for {progress.held_ms / 1000:.0f} s"),
        Text(f"  served   {served[0]} by {plan.to}, {served[1]} by {progress.stable}; {progress.spilled} spilled"),
        _evidence(progress.measures, plan.to, progress.stable),
    ]
    if progress.bad_workers:
        lines.append(Text(f"  bad      {', '.join(progress.bad_workers)}: replace them", style="yellow"))
    if progress.waits_for:
        lines.append(Text(f"  waits    for {progress.waits_for}"))
    if progress.reason:
        lines.append(Text(f"  why      {progress.reason}", style=color))
    return Group(*lines)


def _evidence(measures: "list[Measure]", new: str, old: str) -> "RenderableType":
    """Bad requests by criterion; e against the new version, e' for it."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=True)
    table.add_column("criterion")
    for head in (f"bad, {new}", f"bad, {old}", "e against", "e' for", "verdict"):
        table.add_column(head, justify="right")
    for each in measures:
        good, bad = each.log_for >= each.log_go_on, each.log_against >= each.log_stop
        table.add_row(
            each.criterion,
            str(each.canary),
            str(each.stable),
            f"{_power(each.log_against)} of {math.exp(each.log_stop):,.0f}",
            f"{_power(each.log_for)} of {math.exp(each.log_go_on):.0f}",
            "worse" if bad else "not worse" if good else "not known yet",
            style="red" if bad else "green" if good else None,
        )
    return table


def _power(log: float) -> str:
    return f"{math.exp(log):.3g}" if log < 600 else f"10^{log / math.log(10):.0f}"
