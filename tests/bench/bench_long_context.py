"""Prompts of a million tokens beside ordinary streams, on a whole stack with the simulated engine.

    python -m tests.bench.bench_long_context [--tokens 1000000] [--prompts 5] [--streams 8]

Prints the gaps between the chunks of the ordinary streams without and with the long prompts (aim: the longest gap
grows by at most 50 ms), how long a long prompt took, and the peak memory of each service. The streams share gateway,
scheduler and worker with the prompts; those are sent by a process of its own, so that what is measured is not our own
doing. On a machine that is busy with other things the gaps are those of its other things.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from tests.support.stack import Stack

ITL_MS = 20
CONTEXT = 1_048_576
BASELINE_S = 15.0

SENDER = """
import http.client, json, sys, time
host, key, path, count = sys.argv[1:]
body = open(path, "rb").read()
for _ in range(int(count)):
    started = time.monotonic()
    connection = http.client.HTTPConnection(host, timeout=300)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    answer = connection.getresponse()
    data = answer.read()
    took = time.monotonic() - started
    usage = json.loads(data).get("usage") if answer.status == 200 else data[:300].decode()
    print(json.dumps({"status": answer.status, "took_s": took, "usage": usage}), flush=True)
"""


async def listen(client: httpx.AsyncClient, model: str, gaps: list[tuple[float, float]], stop: asyncio.Event) -> None:
    """One stream after the other; notes when each chunk came and how long after the one before."""
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "stream": True}
    while not stop.is_set():
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            before = 0.0
            async for line in response.aiter_lines():
                if '"content":' in line:
                    now = time.monotonic()
                    if before:
                        gaps.append((now, now - before))
                    before = now
                if stop.is_set():
                    return


def quantiles(gaps: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(gaps)
    shown = {name: ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1000 for name, share in QUANTILES}
    return {name: round(value, 1) for name, value in shown.items()}


QUANTILES = (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0))


def peaks(stack: Stack) -> dict[str, int]:
    """Peak memory of each role in MiB."""
    found = {}
    for role, pids in stack.run.pids.items():
        status = Path(f"/proc/{pids[0]}/status").read_text()
        found[role] = int(status.split("VmHWM:")[1].split()[0]) // 1024
    return found


async def measure(stack: Stack, tokens: int, prompts: int, streams: int, directory: Path) -> dict[str, Any]:
    """Gaps without and with, and what became of the long prompts."""
    text = " ".join(f"w{number % 99991}" for number in range(tokens - 4))
    body = {"model": stack.model, "messages": [{"role": "user", "content": text}], "max_tokens": 3}
    file = directory / "body.json"
    file.write_text(json.dumps(body))
    gaps: list[tuple[float, float]] = []
    stop = asyncio.Event()
    memory_before = peaks(stack)
    async with stack.async_client(limits=httpx.Limits(max_connections=streams)) as client:
        client.timeout = httpx.Timeout(60)
        listeners = [asyncio.create_task(listen(client, "simulated", gaps, stop)) for _ in range(streams)]
        await asyncio.sleep(2)
        gaps.clear()
        await asyncio.sleep(BASELINE_S)
        began = time.monotonic()
        host = stack.run.url.removeprefix("http://")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SENDER, host, stack.run.key, str(file), str(prompts)), stdout=subprocess.PIPE
        )
        output, _ = await process.communicate()
        ended = time.monotonic()
        stop.set()
        await asyncio.gather(*listeners)
    return {
        "body_mb": round(file.stat().st_size / 1e6, 1),
        "without": quantiles([gap for at, gap in gaps if at < began]),
        "with": quantiles([gap for at, gap in gaps if began <= at <= ended]),
        "long": [json.loads(line) for line in output.decode().splitlines()],
        "peak_mib_before": memory_before,
        "peak_mib": peaks(stack),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        settings = ("--sim-context", str(CONTEXT), "--sim-kv-tokens", str(2 * CONTEXT), "--sim-itl-ms", str(ITL_MS))
        stack = Stack(directory / "data", "--engine", "simulated", "--sim-prefill-tps", "1000000", *settings)
        try:
            stack.wait_ready()
            found = asyncio.run(measure(stack, options.tokens, options.prompts, options.streams, directory))
        finally:
            stack.stop()
    for name, value in found.items():
        print(name, *(value if isinstance(value, list) else [value]), sep="\n  " if isinstance(value, list) else "  ")
    grown = found["with"]["max"] - found["without"]["max"]
    print(f"the longest gap grew by {grown:.0f} ms (aim: at most 50)")


if __name__ == "__main__":
    main()
