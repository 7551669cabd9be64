"""Three load generators beside each other: ``headrace bench``, ``vllm bench serve`` and GuideLLM on one stack.

    python -m tests.official.generators [--requests 100] [--rate 5] [--rounds 3]

Prompts alike (each run has its own, so that no cache knows them) and equal arrivals (a metronome), in turn, so that
what the machine does meanwhile meets all of them. The simulated engine takes fixed times: so long for each prompt
token, and so long between tokens; all else that a generator tells is the stack's and its own. Prints the medians of the
rounds side by side; exit 1 where ours is further than 5 % from both others. GuideLLM is installed in an environment of
its own in the cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compose.bench.workload import Load, plan
from compose.cli.common import lengths_of
from tests.official.__main__ import CACHE
from tests.official.tools import GUIDELLM, VLLM_BENCH_SERVE, Place, environment, tokenizer_folder
from tests.support.stack import HEADRACE, Stack

PROMPT_TOKENS, OUTPUT_TOKENS = 100, 30
PREFILL_TPS, ITL_MS = 2000, 25
LENGTHS = lengths_of(f"{PROMPT_TOKENS},{OUTPUT_TOKENS}")
TOLERANCE = 0.05
FIGURES = (
    "time to first token, median, ms",
    "inter-token latency, mean, ms",
    "end to end, median, ms",
    "requests a second",
    "output tokens a second",
    "prompt tokens",
    "output tokens",
)


def _run(command: list[str], folder: Path, key: str) -> None:
    """To its end; raises SystemExit with what it said."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or command[0] == HEADRACE[0]}
    variables = inherited | {"OPENAI_API_KEY": key, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[:3]}: exit {done.returncode}\n{(done.stdout + done.stderr)[-3000:]}")


def headrace(place: Place, load: Load, rate: float) -> list[float]:
    """Ours."""
    options = ["--requests", str(load.requests), "--rate", str(rate), "--burstiness", "inf", "--seed", str(load.seed)]
    options += ["--lengths", f"{PROMPT_TOKENS},{OUTPUT_TOKENS}", "--key", place.key, "--result", "headrace.json"]
    _run([*HEADRACE, "bench", place.url, "--model", place.model, *options], place.folder, place.key)
    return _of_vllm(json.loads((place.folder / "headrace.json").read_text()))


def vllm(place: Place, load: Load, rate: float) -> list[float]:
    """With ``--burstiness`` so high that its gaps are equal."""
    flags: dict[str, Any] = {
        "backend": "openai-chat",
        "base-url": place.url,
        "endpoint": "/v1/chat/completions",
        "model": place.model,
        "tokenizer": tokenizer_folder(place.model),
        "dataset-name": "custom",
        "dataset-path": "prompts.jsonl",
        "custom-output-len": OUTPUT_TOKENS,
        "num-prompts": load.requests,
        "request-rate": rate,
        "burstiness": 1e6,
        "percentile-metrics": "ttft,tpot,itl,e2el",
        "result-filename": "vllm.json",
    }
    line = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    switches = ["--skip-chat-template", "--ignore-eos", "--save-result", "--disable-shuffle"]
    _run([sys.executable, "-c", VLLM_BENCH_SERVE, *line, *switches], place.folder, place.key)
    return _of_vllm(json.loads((place.folder / "vllm.json").read_text()))


def _of_vllm(result: dict[str, Any]) -> list[float]:
    names = ("median_ttft_ms", "mean_itl_ms", "median_e2el_ms", "request_throughput", "output_throughput")
    means = [result[f"total_{side}_tokens"] / result["completed"] for side in ("input", "output")]
    return [*(result[name] for name in names), *means]


def guidellm(place: Place, load: Load, rate: float) -> list[float]:
    """Its inter-token latency is that of whole requests; the end to end counts from the sending."""
    flags = {
        "backend": f"kind=openai_http,target={place.url},model={place.model},api_key={place.key}",
        "profile": f"kind=constant,rate={rate:g}",
        "constraint": f"kind=max_requests,count={load.requests}",
        "tokenizer": f"kind=huggingface_auto,model={tokenizer_folder(place.model)}",
        "data": "kind=json_file,path=prompts.jsonl",
        "output": "kind=json,path=guidellm.json",
    }
    line = [word for name, value in flags.items() for word in (f"--{name}", value)]
    program = CACHE / "guidellm" / "venv" / "bin" / "guidellm"
    _run([str(program), "run", *line, "--disable-progress"], place.folder, place.key)
    [benchmark] = json.loads((place.folder / "guidellm.json").read_text())["benchmarks"]

    def of(name: str, kind: str) -> float:
        return float(benchmark["metrics"][name]["successful"][kind])

    return [
        of("time_to_first_token_ms", "median"),
        of("inter_token_latency_ms", "mean"),
        of("request_latency", "median") * 1000,
        of("requests_per_second", "mean"),
        of("output_tokens_per_second", "mean"),
        of("prompt_token_count", "mean"),
        of("output_token_count", "mean"),
    ]


GENERATORS: dict[str, Callable[[Place, Load, float], list[float]]] = {
    "headrace bench": headrace,
    "vllm bench serve": vllm,
    "GuideLLM": guidellm,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        place = Place(CACHE / "guidellm", folder, "", "", "")
        environment(place, GUIDELLM, beside=True)
        times = ("--sim-prefill-tps", str(PREFILL_TPS), "--sim-itl-ms", str(ITL_MS))
        stack = Stack(folder / "data", "--engine", "simulated", *times).wait_ready()
        found: dict[str, list[list[float]]] = {name: [] for name in GENERATORS}
        try:
            place = Place(folder, folder / "data", stack.run.url, stack.run.key, stack.model)
            for seed, name in enumerate([*GENERATORS] * given.rounds):
                load = Load(requests=given.requests, lengths=LENGTHS, seed=seed)
                prompts = [{"prompt": each.turns[0][0], "output_tokens_count": OUTPUT_TOKENS} for each in plan(load)]
                (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
                found[name].append(GENERATORS[name](place, load, given.rate))
                print(name, *(f"{value:.1f}" for value in found[name][-1]), file=sys.stderr, flush=True)
        finally:
            stack.stop()
    return tell({name: [statistics.median(run) for run in zip(*runs, strict=True)] for name, runs in found.items()})


def tell(medians: dict[str, list[float]]) -> int:
    """The table; 1 where ours is beside both others."""
    print(f"| | {' | '.join(medians)} |")
    print("|---" * (len(medians) + 1) + "|")
    ours, *others = medians.values()
    beside = 0
    for index, figure in enumerate(FIGURES):
        print(f"| {figure} | {' | '.join(f'{values[index]:.1f}' for values in medians.values())} |")
        beside += all(abs(ours[index] / other[index] - 1) > TOLERANCE for other in others)
    return 1 if beside else 0


if __name__ == "__main__":
    sys.exit(main())
