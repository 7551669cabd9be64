"""``headrace simulate``: a fleet of a TOML file, simulated with the scheduler that runs in production."""

import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compose.cli.common import JsonOption, show, table
from compose.stack.data_dir import ComposeError

if TYPE_CHECKING:
    from simulator.report import ModelReport, Report


_CALLERS = (
    "model",
    "requests",
    "completed",
    "good",
    "good/s",
    "TTFT ms p50/p95/p99",
    "TPOT ms p50/p99",
    "E2E s p50/p99",
)
_FLEET = (
    "model",
    "output tok/s",
    "hit rate",
    "fairness",
    "balance",
    "preempted",
    "lost",
    "worker h",
    "cost",
    "per M tok",
)


def simulate(
    file: Annotated[Path, typer.Argument(help="Scenario, as simulator/README.md describes it.")],
    seed: Annotated[int | None, typer.Option(show_default="the file's", help="Decides all that is random.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the run as an SVG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Simulate a fleet: goodput, percentiles, fairness, hit rate and cost; the same seed gives the same run."""
    import msgspec
    from rich.console import Console
    from rich.progress import Progress

    from simulator import report
    from simulator.picture import draw
    from simulator.scenario import BadScenario, load

    began_s = time.monotonic()
    try:
        scenario = load(file)
        if seed is not None:
            scenario = msgspec.structs.replace(scenario, seed=seed)
        with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
            task = bar.add_task("requests", total=scenario.requests)
            found = report.simulate(scenario, file.parent, lambda asked: bar.update(task, completed=asked))
        if picture is not None:
            picture.write_text(draw(found, file.stem))
    except (BadScenario, OSError) as error:
        raise ComposeError(str(error)) from error
    show(found, f"{_text(found)}\n{_took(found, time.monotonic() - began_s)}", as_json=as_json)


def _text(found: "Report") -> str:
    lines = [*found.models, found.total] if len(found.models) > 1 else found.models
    callers = table(_CALLERS, [_callers(each) for each in lines])
    fleet = table(_FLEET, [_fleet(each) for each in lines])
    endings = "\n".join(
        f"{each.model}: {_counts(each.ended)}; refused: {_counts(each.refusals) or 'none'}" for each in lines
    )
    return f"{found.simulated_s:g} s simulated, seed {found.seed}\n{callers}\n{fleet}\n{endings}"


def _took(found: "Report", wall_s: float) -> str:
    """What the run cost this process, and which rules were checked."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    cpu_s, checked = usage.ru_utime + usage.ru_stime, found.checked
    return (
        f"{found.total.requests:,} requests in {wall_s:.1f} s, {cpu_s:.1f} s of CPU "
        f"({cpu_s / max(1, found.total.requests) * 1000:.3f} ms a request), at most {peak / 1e6:,.0f} MB of memory\n"
        f"checked, and held: {checked['requests']:,} requests ended once, {checked['admissions']:,} admissions within "
        f"the limits, {checked['tenants']:,} tenants and {checked['workers']:,} workers with nothing left at the end"
    )


def _counts(of: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in of.items())


def _callers(it: "ModelReport") -> tuple[Any, ...]:
    ttft, tpot, e2e = it.ttft_ms, it.tpot_ms, it.e2e_ms
    return (
        it.model,
        it.requests,
        it.ended.get("completed", 0),
        it.good,
        f"{it.goodput_per_s:.2f}",
        f"{ttft.p50:.0f} / {ttft.p95:.0f} / {ttft.p99:.0f}",
        f"{tpot.p50:.1f} / {tpot.p99:.1f}",
        f"{e2e.p50 / 1000:.2f} / {e2e.p99 / 1000:.2f}",
    )


def _fleet(it: "ModelReport") -> tuple[Any, ...]:
    return (
        it.model,
        f"{it.output_tokens_per_s:.0f}",
        f"{it.hit_rate:.1%}",
        f"{it.fairness:.3f}",
        f"{it.balance:.2f}",
        it.preemptions,
        it.lost_workers,
        f"{it.worker_hours:.2f}",
        f"{it.cost:.2f}",
        f"{it.cost_per_million_tokens:.3f}",
    )
