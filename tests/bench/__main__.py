"""``make bench``: every benchmark in its short form, one after the other, each in a process of its own.

``make bench ARGS=NAME`` runs one of them with its own defaults: ``ARGS=peers``, ``ARGS="stream --streams 32"``.
"""

import subprocess
import sys

BENCHES: list[list[str]] = [
    ["tests.bench.bench_stream"],
    ["tests.bench.bench_requests", "--runs", "2"],
    ["tests.bench.bench_metrics"],
    ["tests.bench.bench_scheduler"],
    ["tests.bench.bench_shards", "--requests", "5000"],
    ["tests.bench.bench_rollout", "5", "50"],
    ["tests.bench.bench_overload", "--seconds", "40"],
    ["tests.bench.bench_saturation", "--seconds", "8"],
    ["tests.bench.bench_abuse"],
    ["tests.bench.bench_ledger"],
    ["tests.bench.bench_ledger_kills", "50000", "5"],
    ["tests.bench.bench_queries", "500000"],
]


def main() -> int:
    if sys.argv[1:]:
        name, *options = sys.argv[1:]
        return subprocess.run([sys.executable, "-m", f"tests.bench.bench_{name}", *options], check=False).returncode
    status = 0
    for bench in BENCHES:
        print(f"== {' '.join(bench)}", flush=True)
        status |= subprocess.run([sys.executable, "-m", *bench], check=False).returncode
    return status


if __name__ == "__main__":
    raise SystemExit(main())
