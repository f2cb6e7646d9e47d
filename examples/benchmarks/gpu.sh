#!/usr/bin/env bash
# What a machine with a GPU and no network is asked, most valuable first. A command there ends after ten minutes at most.
#     bash examples/benchmarks/gpu.sh now            # the one list (agenda.py): what has no row yet, in nine minutes; another call
#                                                    # goes on. It writes rows.jsonl, report.md and now.txt, of at most 1 MiB
#     bash examples/benchmarks/gpu.sh now --dry-run  # its order and expected seconds; fails if the first call would be too long
#     bash examples/benchmarks/gpu.sh ranks          # on a machine with several GPUs: their tests; has not run yet
#     bash examples/benchmarks/gpu.sh now --pretend  # on a CPU, with tiny sizes, in a folder that is removed: whether it works
# Variables: OUT (folder for results), PYTHON, MINUTES (of the list), COMMIT (where git is not at hand).
set -uo pipefail
cd "$(dirname "$0")/../.."
list=${1:-now} minutes=${MINUTES:-9}
out=${OUT:-runs/benchmarks}
python=${PYTHON:-python3}
if [ "$list" = --pretend ] || [ "$list ${2:-}" = "now --pretend" ]; then # its figures are of nothing, so they are not kept, and the machine may be busy
    list=pretend minutes=30
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}
if [ "${2:-}" = --dry-run ]; then
    exec "$python" -m examples.benchmarks --list "$list" --dry-run --out "$out"
fi
if compgen -G "wheels/*.whl" >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/wheels wheels/*.whl &&
        export PYTHONPATH="$PYTHONPATH:/tmp/wheels"
fi
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,memory.used,driver_version --format=csv,noheader
# What hangs is interrupted when the time is over, and killed ten seconds later. Each item has a limit of its own.
timeout -s INT -k 10 "$(awk "BEGIN { print int($minutes * 60 + 25) }")" \
    "$python" -m examples.benchmarks --list "$list" --minutes "$minutes" --out "$out" 2>&1 | tee "$out/$list.txt"
status=${PIPESTATUS[0]}
truncate -s "<1M" "$out/$list.txt"
[ "$list" = pretend ] && echo "left: $(cd "$out" && wc -l rows.jsonl) $(cd "$out" && echo *)"
exit "$status"
