"""What a chunk costs here and in other gateways, side by side on one machine.

    make bench ARGS=peers
    python -m tests.bench.bench_peers [--peers vllm-router litellm] [--streams 32 128 512] [--tokens 64 512]

Each is measured in turn, round after round, and medians are told, for machines are shared and their pace changes.
Others are installed from the package registries, each in an environment of its own below the user's cache; what cannot
be had is said and left out. They speak HTTP to an engine (``openai_engine``) as cheap as Python can be, which is not
counted; Headrace speaks to its worker with the simulated engine, not counted either. Headrace authenticates, counts
tokens, keeps quotas, queues fairly, repairs gaps and writes a ledger; vLLM's router picks a server in turn.
"""

import argparse
import os
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import msgspec
import psutil  # type: ignore[import-untyped,unused-ignore]
import uvloop

from compose.stack.processes import die_with
from tests.bench.stream_load import Server, cpu_s, first_tokens, percentile, streams
from tests.support.nats_server import free_port
from tests.support.stack import ROOT, Stack

LITELLM_STREAMS_MAX = 32
"""It takes a core for more."""
CHUNKS = 16_384
"""Of each measurement, or one answer on each stream where that is more."""
START_S = 120.0

LITELLM = """model_list:
  - model_name: simulated
    litellm_params: {{model: openai/simulated, api_base: "{engine}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
general_settings: {{master_key: {key}}}
"""
KEY = f"sk-{secrets.token_hex(32)}"
"""Of a router that starts with none but a strong one; others ignore it."""


class Peer(msgspec.Struct, frozen=True):
    """Something that streams go through."""

    name: str
    server: Server
    pids: list[int]
    streams_max: int = 10_000


def installed(name: str, requirement: str) -> Path:
    """The scripts of an environment that holds it; raises subprocess.CalledProcessError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "headrace" / "bench" / requirement.replace("==", "-")
    if not (place / "bin" / name).exists():
        print(f"installing {requirement} in {place}", flush=True)
        venv.create(place, with_pip=True, clear=True)
        subprocess.run([place / "bin" / "pip", "install", "-q", requirement], check=True, stderr=subprocess.DEVNULL)
    return place / "bin"


@contextmanager
def process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``command`` until the end of the block; its output goes to ``log``."""
    parent = os.getpid()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with log.open("wb") as output:
        started = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: die_with(parent),  # noqa: PLW1509
        )
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


@contextmanager
def other(name: str, requirement: str, options: list[str], directory: Path, streams_max: int) -> Iterator[Peer | None]:
    """A router of others; None where it cannot be had, which is said."""
    try:
        command = [str(installed(name, requirement) / name), *options]
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"{requirement} cannot be had here ({error}): compared without it")
        yield None
        return
    port = free_port()
    server = Server(f"http://127.0.0.1:{port}", "simulated", KEY)
    with process([*command, "--host", "127.0.0.1", "--port", str(port)], directory / f"{name}.log") as running:
        deadline = time.monotonic() + START_S
        while not answers(server):
            if running.poll() is not None or time.monotonic() > deadline:
                print(f"{requirement} does not start: {(directory / f'{name}.log').read_text()[-500:]}")
                yield None
                return
            time.sleep(0.5)
        children = psutil.Process(running.pid).children(recursive=True)
        yield Peer(requirement, server, [running.pid, *(child.pid for child in children)], streams_max)


def answers(server: Server) -> bool:
    """Whether a chat gets through."""
    body = {"model": server.model, "messages": [{"role": "user", "content": "one"}], "stream": True, "max_tokens": 1}
    try:
        url = f"{server.url}/v1/chat/completions"
        given = httpx.post(url, json=body, headers={"Authorization": f"Bearer {server.key}"}, timeout=5)
    except httpx.HTTPError:
        return False
    return given.status_code == 200


def chunk_us(peer: Peer, at_once: int, tokens: int) -> float:
    """CPU of one chunk."""
    before = cpu_s(peer.pids)
    count = max(1, CHUNKS // at_once // tokens)
    request = peer.server.request(tokens=tokens)
    found = uvloop.run(streams(peer.server, at_once=at_once, answers=count, request=request, spread_s=0.5))
    return (cpu_s(peer.pids) - before) / sum(answer.chunks for answer in found) * 1e6


def first_ms(peer: Peer) -> list[float]:
    """To the first token of requests that are alone."""
    request = peer.server.request(tokens=2, simulate={"ttft_ms": 0, "itl_ms": 1})
    return [span * 1000 for span in uvloop.run(first_tokens(peer.server, request, 100))]


def compare(peers: list[Peer], at_once: list[int], tokens: list[int], rounds: int) -> None:
    """Print the table."""
    costs: dict[tuple[str, int, int], list[float]] = {}
    firsts: dict[str, list[float]] = {}
    for _ in range(rounds):
        for peer in peers:
            firsts.setdefault(peer.name, []).extend(first_ms(peer))
        for length in tokens:
            for count in at_once:
                for peer in peers:
                    if count <= peer.streams_max:
                        costs.setdefault((peer.name, count, length), []).append(chunk_us(peer, count, length))
    heads = [f"{count} x {length}" for length in tokens for count in at_once]
    print("\nCPU per chunk in us (streams x tokens of each answer), and the first token of a request alone in ms")
    print(f"| {'':24} | " + " | ".join(f"{head:>9}" for head in heads) + " | first p50 |   p99 |")
    for peer in peers:
        cells = []
        for length in tokens:
            for count in at_once:
                found = costs.get((peer.name, count, length))
                cells.append(f"{statistics.median(found):9.1f}" if found else f"{'-':>9}")
        first = firsts[peer.name]
        print(
            f"| {peer.name:24} | {' | '.join(cells)} | {percentile(first, 0.5):9.2f} | {percentile(first, 0.99):5.1f} |"
        )


def machine() -> str:
    """What this ran on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return f"{os.cpu_count()} cores of {model}, Linux {platform.release()}, load {load}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", nargs="*", default=["vllm-router", "litellm"])
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as made, ExitStack() as ends:
        directory = Path(made)
        port = free_port()
        engine = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "tests.bench.openai_engine", str(port)]
        ends.enter_context(process(command, directory / "engine.log"))
        (directory / "litellm.yaml").write_text(LITELLM.format(engine=engine, key=KEY))
        known = {
            "vllm-router": (
                "vllm-router==0.1.17",
                ["--worker-urls", engine, "--policy", "round_robin", "--log-level", "error"],
                10_000,
            ),
            "litellm": ("litellm[proxy]==1.108.7", ["--config", str(directory / "litellm.yaml")], LITELLM_STREAMS_MAX),
        }
        peers = []
        for name in options.peers:
            requirement, arguments, most = known[name]
            if peer := ends.enter_context(other(name, requirement, arguments, directory, most)):
                peers.append(peer)
        stack = Stack(directory / "data", "--engine", "simulated", "--sim-slots", "16384").wait_ready()
        ends.callback(stack.stop)
        server = Server(stack.run.url, stack.model, stack.run.key)
        pids = [*stack.run.pids["gateway"], *stack.run.pids["nats"]]
        compare(
            [Peer("Headrace gateway + nats", server, pids), *peers], options.streams, options.tokens, options.rounds
        )
    print(machine())


if __name__ == "__main__":
    main()
