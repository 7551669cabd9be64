"""``headrace bench``: load for a server, and what its callers see of it."""

import asyncio
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compose.cli.common import lengths_of, table
from compose.stack.data_dir import ComposeError

if TYPE_CHECKING:
    from compose.bench.measure import Seen, Span, Summary
    from compose.bench.workload import Planned


def bench(
    url: Annotated[str, typer.Argument(help="Root of the server, as http://127.0.0.1:8080.")],
    model: Annotated[str, typer.Option(help="Name of the model.")],
    key: Annotated[
        list[str] | None,
        typer.Option(envvar="HEADRACE_API_KEYS", help="API key; several: as many tenants, with equal shares."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="So many, or conversations.")] = 200,
    rate: Annotated[float, typer.Option(help="Arrivals a second; inf: as fast as the concurrency allows.")] = math.inf,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma distributed gaps: 1 Poisson, below it bursts, inf regular.")
    ] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Open at once at most. Without --rate a closed loop of so many callers.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="PROMPT,OUTPUT in tokens, or azure-conversation, azure-code, mooncake-conversation.")
    ] = "256,64",
    prefixes: Annotated[int, typer.Option(min=0, help="System prompts that requests share.")] = 0,
    prefix_tokens: Annotated[int, typer.Option(min=1, help="Length of each of them.")] = 512,
    turns: Annotated[int, typer.Option(min=1, help="Of each conversation.")] = 1,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace (Mooncake's JSON lines) instead.")] = None,
    speed: Annotated[float, typer.Option(help="Of the replay.")] = 1.0,
    goodput: Annotated[
        str,
        typer.Option(
            help="Service level in ms, as ttft:500,tpot:50,itl:200,e2e:10000. Without one all that end well are good."
        ),
    ] = "",
    timeout_s: Annotated[float, typer.Option(help="After which a request has failed.")] = 600.0,
    ignore_eos: Annotated[
        bool, typer.Option(help="Ask for whole outputs; servers other than vLLM's kind may refuse it.")
    ] = True,
    seed: int = 0,
    result: Annotated[
        Path | None, typer.Option(help="Write the result, as vllm bench serve does, to this file.")
    ] = None,
    per_request: Annotated[Path | None, typer.Option(help="Write a JSON line a request to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write a picture (SVG) to this file.")] = None,
) -> None:
    """Load a server that speaks OpenAI's chat API, and tell its latencies, throughput and goodput.

    Delays count from when a request was due, and requests that failed are not good. Tokens are those of the
    server's usage.
    """
    from compose.bench.client import Target
    from compose.bench.workload import BadTrace, Load, plan, replay

    if not url.startswith(("http://", "https://")):
        raise ComposeError(f"{url!r} is no URL: give http://HOST:PORT or https://HOST:PORT")
    for name, value in (("rate", rate), ("burstiness", burstiness), ("speed", speed), ("timeout-s", timeout_s)):
        if not value > 0:
            raise ComposeError(f"--{name} must be above 0")
    level = _level(goodput)
    keys = tuple(key or [""])
    if trace is not None:
        try:
            planned: Iterable[Planned] = list(replay(trace, requests=requests, speed=speed, tenants=len(keys)))
        except (BadTrace, OSError) as error:
            raise ComposeError(str(error)) from error
    else:
        planned = plan(
            Load(
                requests=requests,
                lengths=lengths_of(lengths),
                rate=rate,
                burstiness=burstiness,
                prefixes=prefixes,
                prefix_tokens=prefix_tokens,
                turns=turns,
                tenants=len(keys),
                seed=seed,
            )
        )
    target = Target(url=url, model=model, keys=keys, timeout_s=timeout_s, ignore_eos=ignore_eos)
    closed = trace is None and math.isinf(rate) and concurrency is not None
    line = _run(target, planned, requests * (1 if trace else turns), concurrency, closed=closed)
    about: dict[str, Any] = {"model_id": model, "num_prompts": len(line), "max_concurrency": concurrency}
    about |= {"request_rate": "inf" if math.isinf(rate) else rate, "burstiness": burstiness, "backend": "openai-chat"}
    _tell(line, level, about, f"{model} at {url}", result, per_request, picture)


def _level(text: str) -> "dict[Span, float]":
    from compose.bench.measure import SPANS

    level: dict[Span, float] = {}
    for part in filter(None, text.split(",")):
        name, _, limit = part.strip().partition(":")
        span = next((span for span in SPANS if span == name), None)
        try:
            value = float(limit)
        except ValueError:
            value = math.nan
        if span is None or not value > 0:
            raise ComposeError(f"--goodput: {part!r} is none of {', '.join(f'{each}:MS' for each in SPANS)}")
        level[span] = value
    return level


def _run(
    target: Any, planned: "Iterable[Planned]", total: int, concurrency: int | None, *, closed: bool
) -> "list[Seen]":
    """With a progress bar on standard error."""
    import uvloop
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from compose.bench.client import Generator

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal, refresh_per_second=4) as progress:
        bar = progress.add_task("requests", total=total)
        failed = 0

        def ended(seen: "Seen") -> None:
            nonlocal failed
            failed += not seen.ok
            progress.update(bar, advance=1, description=f"requests ({failed} failed)" if failed else "requests")

        async def work() -> "list[Seen]":
            return await Generator(target, concurrency=concurrency, on_end=ended).run(planned, closed=closed)

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(work())


def _tell(
    line: "list[Seen]",
    level: "dict[Span, float]",
    about: dict[str, Any],
    title: str,
    result: Path | None,
    per_request: Path | None,
    picture: Path | None,
) -> None:
    from compose.bench import measure
    from compose.bench.picture import draw

    summary = measure.summarize(line, level)
    try:
        if result is not None:
            result.write_text(json.dumps(measure.vllm_result(line, summary, about), indent=1), encoding="utf-8")
        if per_request is not None:
            rows = [json.dumps(measure.request_line(seen, level)) for seen in line]
            per_request.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        if picture is not None:
            picture.write_text(draw(line, title), encoding="utf-8")
    except OSError as error:
        print(_report(summary, level))
        raise ComposeError(str(error)) from error
    print(_report(summary, level))
    if not summary.completed:
        why = max(summary.errors, key=summary.errors.__getitem__)
        away = why.startswith("connection")
        raise ComposeError(f"no request ended well: {f'nothing answers there ({why}); is it up?' if away else why}")


def _report(summary: "Summary", level: "dict[Span, float]") -> str:
    from compose.bench.measure import QUANTILES, SPANS

    rows = []
    for span, name in SPANS.items():
        found = summary.spans[span]
        values = (found.mean, found.p50, found.p90, found.p95, found.p99) if found is not None else None
        rows.append((f"{name}, ms", *(f"{value:,.1f}" for value in values)) if values else (f"{name}, ms", *"-----"))
    within = ", ".join(f"{span} {limit:g} ms" for span, limit in level.items()) or "all that ended well"
    figures = [
        ("completed", f"{summary.completed:,} in {summary.duration_s:,.1f} s"),
        ("failed", ", ".join([f"{summary.failed:,}", *(f"{n} x {name}" for name, n in summary.errors.items())])),
        ("requests a second", f"{summary.request_throughput:,.2f}"),
        ("tokens", f"{summary.prompt_tokens:,} in ({summary.cached_tokens:,} cached), {summary.output_tokens:,} out"),
        ("output tokens a second", f"{summary.output_throughput:,.1f}"),
        ("goodput", f"{summary.request_goodput:,.2f} requests and {summary.token_goodput:,.1f} output tokens a second"),
        ("service level", within),
        ("sent late (p99)", f"{summary.send_lag_p99_ms:,.1f} ms"),
    ]
    heads = ("", "mean", *(f"p{share:g}" for share in QUANTILES))
    wide = max(len(name) for name, _ in figures) + 2
    return table(heads, rows) + "\n\n" + "\n".join(f"{name:<{wide}}{value}" for name, value in figures)
