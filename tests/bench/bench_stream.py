"""What a token costs from the worker to the caller's socket, and what is added to the first one.

    python -m tests.bench.bench_stream [--streams 32 128 512] [--tokens 64 512] [--chunks 8192]

A whole stack with the simulated engine, tokens 20 ms apart in common steps. CPU is of whole processes, with what they
do without requests and with what a request costs, spread over its chunks: so answers of 64 tokens show a service, and
those of 512 what a chunk costs. The worker's contains the simulated engine, whose own is measured in a process
without a worker. Machines are shared: compare runs side by side (``bench_peers``) rather than figures.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop

from contracts.messages.records import Manifest
from tests.bench.stream_load import Server, cpu_s, first_tokens, percentile, streams
from tests.support.stack import Stack
from worker.config import WorkerConfig
from worker.engines.base import Counts, Job
from worker.engines.simulated.engine import SimulatedEngine

PROCESSES = ("gateway", "nats", "worker", "scheduler", "ledger")
SLOTS = 16_384


def engine_alone_us(at_once: int, tokens: int, answers: int) -> float:
    """CPU per chunk of the simulated engine, whose chunks nobody wants."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        cost: float = pool.apply(_run_engine, (at_once, tokens, answers))
        return cost


def _run_engine(at_once: int, tokens: int, answers: int) -> float:
    async def run() -> float:
        manifest = Manifest(name="m", version="v", engine="simulated", context=8192, default_output_tokens=16)
        engine = SimulatedEngine(WorkerConfig(model="m", sim_slots=SLOTS), manifest)
        await engine.start()
        body = msgspec.json.encode({"messages": [{"role": "user", "content": "one two three"}], "max_tokens": tokens})

        chunks = 0

        def give(chunk: bytes) -> None:
            nonlocal chunks
            chunks += 1

        async def stream() -> None:
            for _ in range(answers):
                job = Job(
                    request_id="r", attempt=1, endpoint="chat/completions", body=body, stream=True, cache_salt="s"
                )
                await engine.generate(job, Counts(), give)

        began = time.process_time()
        await asyncio.gather(*(stream() for _ in range(at_once)))
        return (time.process_time() - began) / chunks * 1e6

    return uvloop.run(run())


def measure(stack: Stack, server: Server, at_once: int, tokens: int, chunks: int) -> None:
    """Print one line."""
    pids = {name: stack.run.pids[name] for name in PROCESSES}
    answers = max(1, chunks // at_once // tokens)
    before = {name: cpu_s(of) for name, of in pids.items()}
    found = uvloop.run(
        streams(server, at_once=at_once, answers=answers, request=server.request(tokens=tokens), spread_s=0.5)
    )
    count = sum(answer.chunks for answer in found)
    cost = {name: (cpu_s(of) - before[name]) / count * 1e6 for name, of in pids.items()}
    alone = engine_alone_us(at_once, tokens, answers)
    pauses = [pause * 1000 for answer in found for pause in answer.pauses]
    first = [(answer.first_at - answer.asked_at) * 1000 for answer in found]
    print(
        f"{at_once:5} {tokens:4} | {cost['gateway']:7.1f} {cost['nats']:5.1f} {cost['gateway'] + cost['nats']:6.1f} | "
        f"{cost['worker']:6.1f} {cost['worker'] - alone:14.1f} | {cost['scheduler']:5.1f} {cost['ledger']:6.1f} | "
        f"{percentile(pauses, 0.5):6.1f} {percentile(pauses, 0.99):6.1f} | "
        f"{percentile(first, 0.5):6.1f} {percentile(first, 0.99):7.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--chunks", type=int, default=8192, help="in each run; one answer on each stream at least")
    parser.add_argument("--requests", type=int, default=200, help="for the first token of a request that is alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        stack = Stack(Path(directory) / "data", "--engine", "simulated", "--sim-slots", str(SLOTS)).wait_ready()
        try:
            server = Server(stack.run.url, stack.model, stack.run.key)
            at_once = server.request(tokens=2, simulate={"ttft_ms": 0, "itl_ms": 1})
            spans = [span * 1000 for span in uvloop.run(first_tokens(server, at_once, options.requests))]
            print(
                f"first token added, alone: p50 {percentile(spans, 0.5):.1f} ms, p90 {percentile(spans, 0.9):.1f} ms, "
                f"p99 {percentile(spans, 0.99):.1f} ms"
            )
            print("CPU per chunk in us; times in ms")
            print("streams tokens | gateway nats both | worker less engine | scheduler ledger | pause p50 p99 | first")
            for tokens in options.tokens:
                for streams_at_once in options.streams:
                    measure(stack, server, streams_at_once, tokens, options.chunks)
        finally:
            stack.stop()


if __name__ == "__main__":
    main()
