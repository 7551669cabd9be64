"""``headrace capacity``: how many workers a load needs, for a stated service level."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compose.cli.common import JsonOption, lengths_of, show, table
from compose.stack.data_dir import ComposeError

if TYPE_CHECKING:
    from simulator.capacity import Level, Need, Size, Speeds

VERIFY_REQUESTS = 4_000
ENOUGH = 0.99
"""Of requests that are good, in the simulator, too."""


def capacity(
    rate: Annotated[float, typer.Option(min=0.001, help="Requests a second.")],
    lengths: Annotated[str, typer.Option(help="A public trace's name, or PROMPT,OUTPUT in tokens.")] = "",
    bench: Annotated[
        Path | None, typer.Option(help="A result of `headrace bench` or `vllm bench serve`: its lengths, and speeds.")
    ] = None,
    hit_rate: Annotated[float, typer.Option(min=0, max=0.99, help="Share of prompt tokens that caches have.")] = 0.0,
    prefill_tps: Annotated[float | None, typer.Option(min=0.001, help="A worker's prompt tokens a second.")] = None,
    itl_ms: Annotated[float | None, typer.Option(min=0.001, help="Its gap between tokens with full slots.")] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences that it runs at once.")] = 64,
    kv_tokens: Annotated[int, typer.Option(min=1, help="Tokens that its KV cache holds.")] = 500_000,
    ttft_ms: Annotated[float, typer.Option(min=0.001, help="First token of 99 of 100 requests within.")] = 2_000,
    tpot_ms: Annotated[float, typer.Option(min=0.001, help="Time per output token of 99 of 100 within.")] = 100,
    spare: Annotated[int, typer.Option(min=0, help="Workers that may be lost.")] = 1,
    verify: Annotated[bool, typer.Option(help="Look for the number in the simulator, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """How many workers a load needs: what binds, what is assumed, and what a fifth more or less changes."""
    import msgspec

    from simulator import capacity as model

    measured = _measured(bench) if bench is not None else None
    if measured is None and not lengths:
        raise ComposeError("say how long requests are: --lengths PROMPT,OUTPUT, a trace's name, or --bench FILE")
    prefill_tps = prefill_tps or (measured.prefill_tps if measured else None)
    itl_ms = itl_ms or (measured.itl_ms if measured else None)
    if prefill_tps is None or itl_ms is None:
        raise ComposeError("say what a worker does: --prefill-tps and --itl-ms, or --bench FILE that shows both")
    speeds = model.Speeds(prefill_tps=prefill_tps, itl_ms=itl_ms, slots=slots, kv_tokens=kv_tokens)
    level = model.Level(ttft_ms=ttft_ms, tpot_ms=tpot_ms)
    sizes = measured.sizes if measured and not lengths else model.sample(lengths_of(lengths), hit_rate=hit_rate)
    try:
        found = model.need(rate, sizes, speeds, level)
        around = model.sensitivity(rate, sizes, speeds, level)
        simulated = _verified(rate, sizes, speeds, level, found) if verify else None
    except model.Unreachable as error:
        raise ComposeError(str(error)) from error
    answer = {
        "workers": found.workers + spare,
        "needed": msgspec.to_builtins(found),
        "spare": spare,
        "speeds": msgspec.to_builtins(speeds),
        "service_level": msgspec.to_builtins(level),
        "sensitivity": {name: msgspec.to_builtins(it) for name, it in around.items()},
        "simulated_workers": simulated,
    }
    show(answer, _text(rate, sizes, speeds, level, found, spare, around, simulated), as_json=as_json)


class _Measured:
    """What a benchmark's result shows."""

    def __init__(self, result: dict[str, Any]) -> None:
        from simulator.capacity import Size

        prompts, outputs, ttfts = (result[name] for name in ("input_lens", "output_lens", "ttfts"))
        errors = result.get("errors") or [""] * len(prompts)
        rows = [
            (prompt, output, ttft)
            for prompt, output, ttft, error in zip(prompts, outputs, ttfts, errors, strict=True)
            if not error and prompt > 0 and output > 0
        ]
        if len(rows) < 2:
            raise ValueError("it has fewer than two requests that were answered")
        cached = result.get("cached_tokens") or 0
        share = cached / max(1, sum(prompt for prompt, _, _ in rows))
        self.sizes = [Size(prompt, int(prompt * share), output) for prompt, output, _ in rows]
        self.itl_ms: float | None = result.get("mean_tpot_ms")
        self.prefill_tps = _speed([(prompt, ttft) for prompt, _, ttft in rows])


def _speed(rows: list[tuple[int, float]]) -> float | None:
    """Prompt tokens a second: the slope of the first token's time over the prompt's length, where it is one."""
    count = len(rows)
    mean_prompt = sum(prompt for prompt, _ in rows) / count
    mean_ttft = sum(ttft for _, ttft in rows) / count
    spread = sum((prompt - mean_prompt) ** 2 for prompt, _ in rows)
    together = sum((prompt - mean_prompt) * (ttft - mean_ttft) for prompt, ttft in rows)
    return spread / together if spread > 0 and together > 0 else None


def _measured(path: Path) -> _Measured:
    import msgspec

    try:
        return _Measured(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except (msgspec.MsgspecError, OSError, KeyError, TypeError, ValueError) as error:
        raise ComposeError(f"{path} is no benchmark's result with its requests: {error}") from error


def _verified(rate: float, sizes: "list[Size]", speeds: "Speeds", level: "Level", found: "Need") -> int:
    """The least number of workers with which ENOUGH of the requests are good in the simulator."""
    import math
    import statistics

    from simulator.capacity import least_by
    from simulator.report import simulate
    from simulator.scenario import Delays, Demand, LogNormalLength, Model, Scenario, ServiceLevel, Timing

    def fitted(values: list[int]) -> LogNormalLength:
        logs = [math.log(max(1, value)) for value in values]
        return LogNormalLength(mu=statistics.fmean(logs), sigma=statistics.pstdev(logs))

    worker = Timing(
        slots=speeds.slots, kv_tokens=speeds.kv_tokens, prefill_tps=speeds.prefill_tps, itl_ms=speeds.itl_ms
    )
    demand = Demand(
        rate=rate,
        prompt=fitted([size.prompt - size.cached for size in sizes]),
        output=fitted([size.output for size in sizes]),
        longest=max(max(size.prompt, size.output) for size in sizes),
        tenants=100,
        patience=0,
    )

    def is_enough(workers: int) -> bool:
        scenario = Scenario(
            models=[Model(name="m", workers=workers, worker=worker, demand=demand)],
            requests=VERIFY_REQUESTS,
            service_level=ServiceLevel(ttft_ms=level.ttft_ms, tpot_ms=level.tpot_ms),
            delays=Delays(),
        )
        total = simulate(scenario, Path()).total
        return total.good >= ENOUGH * total.requests

    return least_by(is_enough, found.workers)


def _text(
    rate: float,
    sizes: "list[Size]",
    speeds: "Speeds",
    level: "Level",
    found: "Need",
    spare: int,
    around: "dict[str, Need | str]",
    simulated: int | None,
) -> str:
    prompt, cached, output = (sum(column) / len(sizes) for column in zip(*sizes, strict=True))
    lines = [
        f"{found.workers + spare} workers: {found.workers} needed, {spare} spare; {found.binding} binds",
        f"first token of 99 of 100 within {found.ttft_p99_ms:.0f} ms when all the spare ones are lost",
        "",
        table(("bound", "workers"), list(found.bounds.items())),
        "",
        table(
            ("if", "workers", "binds"),
            [
                (name, it.workers + spare, it.binding) if not isinstance(it, str) else (name, "-", it)
                for name, it in around.items()
            ],
        ),
        "",
        f"assumed: {rate:g} requests/s (Poisson) of {prompt:.0f} prompt tokens ({cached:.0f} cached) and {output:.0f} "
        f"output tokens, the means of {len(sizes)}; a worker does {speeds.prefill_tps:.0f} prompt tokens/s, a token "
        f"each {speeds.itl_ms:g} ms, and has {speeds.slots} slots and {speeds.kv_tokens} KV tokens",
        f"wanted: first token within {level.ttft_ms:g} ms and {level.tpot_ms:g} ms per output token for 99 of 100",
    ]
    if simulated is not None:
        lines.append(f"in the simulator {simulated} workers are the least with which 99 of 100 requests are good")
    return "\n".join(lines)
