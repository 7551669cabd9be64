"""Overload: ten equal tenants ask for three times what the pool can do, on a whole stack with the simulated engine.

    python -m tests.bench.bench_overload [--seconds 60] [--picture overload.svg]

Prints the share of admitted requests that met their first-token deadline (aim: 95 %), the 99th percentile of the
time to a refusal (aim: 20 ms at the gateway, from its log; the client's own figure includes this load generator),
Jain's index of served tokens (aim: 0.95), and how often who obeys Retry-After is admitted at the first return.
Draws time to first token and served tokens per tenant over time.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import httpx

from tests.support.stack import Stack

TENANTS = 10
DEADLINE_MS = 4_000
SLOTS = 16
ITL_MS = 20
TOKENS = (20, 60)
"""Output tokens of a request, drawn evenly."""
OVERLOAD = 3.0


class Tally:
    """What the callers saw."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.first_token_ms: list[float] = []
        self.refusal_ms: list[float] = []
        self.missed_at: list[float] = []
        self.served: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.returns: Counter[bool] = Counter()
        self.waits: list[tuple[float, str, float]] = []
        self.done: list[tuple[float, str, int]] = []


async def ask(client: httpx.AsyncClient, model: str, tenant: str, tokens: int, tally: Tally) -> int | None:
    """One request; None when it was admitted, else the Retry-After."""
    body = {"model": model, "messages": [{"role": "user", "content": "w " * 20}], "max_tokens": tokens, "stream": True}
    headers = {"X-Headrace-Deadline-Ms": str(DEADLINE_MS)}
    asked = time.monotonic()
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        tally.statuses[response.status_code] += 1
        if response.status_code in (429, 529):
            tally.refusal_ms.append((time.monotonic() - asked) * 1000)
            return int(response.headers["retry-after"])
        if response.status_code != 200:
            tally.first_token_ms.append(float("inf"))
            tally.missed_at.append(asked - tally.started)
            return None
        first = True
        async for line in response.aiter_lines():
            if first and line.startswith("data: {"):
                first = False
                wait_ms = (time.monotonic() - asked) * 1000
                tally.first_token_ms.append(wait_ms)
                tally.waits.append((asked - tally.started, tenant, wait_ms))
        tally.served[tenant] += tokens
        tally.done.append((time.monotonic() - tally.started, tenant, tokens))
    return None


async def caller(client: httpx.AsyncClient, model: str, tenant: str, tokens: int, tally: Tally, end: float) -> None:
    """Asks, and when it is refused obeys Retry-After once."""
    retry_after = await ask(client, model, tenant, tokens, tally)
    if retry_after is not None and time.monotonic() + retry_after < end:
        await asyncio.sleep(retry_after)
        tally.returns[await ask(client, model, tenant, tokens, tally) is None] += 1


async def load(stack: Stack, keys: dict[str, str], seconds: float, seed: int) -> Tally:
    rng = random.Random(seed)
    tally = Tally()
    model = stack.model
    per_second = OVERLOAD * SLOTS / (statistics.mean(TOKENS) * ITL_MS / 1000)
    end = time.monotonic() + seconds
    async with asyncio.TaskGroup() as group, httpx.AsyncClient() as _:
        clients = {
            tenant: httpx.AsyncClient(
                base_url=stack.run.url,
                headers={"Authorization": f"Bearer {key}"},
                timeout=60,
                trust_env=False,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=50),
            )
            for tenant, key in keys.items()
        }
        while time.monotonic() < end:
            tenant = rng.choice(list(keys))
            group.create_task(caller(clients[tenant], model, tenant, rng.randint(*TOKENS), tally, end))
            await asyncio.sleep(rng.expovariate(per_second))
    for client in clients.values():
        await client.aclose()
    return tally


def jain(values: list[int]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def picture(tally: Tally, path: Path) -> None:
    """Two panels over time, a line per tenant: time to first token, and tokens served."""
    width, height, left = 900, 260, 60
    span = max(at for at, _, _ in tally.done)
    tenants = sorted(tally.served)
    colours = [f"hsl({360 * index // len(tenants)},65%,45%)" for index in range(len(tenants))]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{2 * height}" font-family="sans-serif">']
    series: list[tuple[str, dict[str, list[tuple[float, float]]]]] = []
    waits: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for at, tenant, wait in sorted(tally.waits):
        waits[tenant].append((at, wait))
    totals: dict[str, list[tuple[float, float]]] = defaultdict(list)
    sums: Counter[str] = Counter()
    for at, tenant, tokens in sorted(tally.done):
        sums[tenant] += tokens
        totals[tenant].append((at, sums[tenant]))
    series = [("time to first token, ms", waits), ("tokens served", totals)]
    for panel, (title, lines) in enumerate(series):
        top = panel * height + 30
        most = max((value for points in lines.values() for _, value in points), default=1)
        parts.append(f'<text x="{left}" y="{top - 10}" font-size="13">{title} (to {most:.0f}), {span:.0f} s</text>')
        parts.append(
            f'<rect x="{left}" y="{top}" width="{width - left - 20}" height="{height - 50}" fill="none" stroke="#999"/>'
        )
        for colour, tenant in zip(colours, tenants, strict=True):
            points = " ".join(
                f"{left + at / span * (width - left - 20):.1f},{top + (height - 50) * (1 - value / most):.1f}"
                for at, value in lines[tenant]
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
    path.write_text("\n".join([*parts, "</svg>"]))


def refusals_at_gateway(stack: Stack) -> list[float]:
    """Milliseconds from request to refusal, from the gateways' logs."""
    spans = []
    for log in (stack.data_dir / "logs").glob("gateway-*.log"):
        for line in log.read_text().splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("http_status") in (429, 529):
                spans.append(float(entry["duration_ms"]))
    return spans


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)] if values else float("nan")


def report(tally: Tally, at_gateway: list[float]) -> None:
    met = sum(wait <= DEADLINE_MS for wait in tally.first_token_ms)
    admitted = len(tally.first_token_ms)
    returned = sum(tally.returns.values())
    print(f"statuses                     {dict(tally.statuses)}")
    print(f"missed, asked in the first 5 s {sum(at < 5 for at in tally.missed_at)}/{len(tally.missed_at)}")
    print(f"admitted, deadline met       {met}/{admitted} = {met / max(1, admitted):.1%}")
    for where, spans in (("gateway", at_gateway), ("client", tally.refusal_ms)):
        print(f"refusal p50 / p99, {where:9} {percentile(spans, 0.5):.1f} / {percentile(spans, 0.99):.1f} ms")
    print(f"Jain's index, served tokens  {jain(list(tally.served.values())):.3f}")
    print(
        f"obeyed Retry-After, admitted {tally.returns[True]}/{returned} = {tally.returns[True] / max(1, returned):.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        sim = ["--sim-slots", str(SLOTS), "--sim-itl-ms", str(ITL_MS)]
        stack = Stack(Path(directory) / "data", "--engine", "simulated", *sim).wait_ready()
        try:
            keys = {}
            for number in range(TENANTS):
                stack.cli_json("tenant", "create", f"t{number}")
                keys[f"t{number}"] = stack.cli_json("key", "create", f"t{number}")["key"]
            print(json.dumps({"slots": SLOTS, "itl_ms": ITL_MS, "deadline_ms": DEADLINE_MS, "overload": OVERLOAD}))
            tally = asyncio.run(load(stack, keys, options.seconds, options.seed))
            at_gateway = refusals_at_gateway(stack)
        finally:
            stack.stop()
    report(tally, at_gateway)
    if options.picture:
        picture(tally, options.picture)
        print(f"drawn in {options.picture}")


if __name__ == "__main__":
    main()
