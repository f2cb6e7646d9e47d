#!/usr/bin/env bash
# Calls of ten minutes on a machine with a GPU and no network: wheels that came along, a list, the report.
#     bash examples/benchmarks/gpu.sh                # the GPU's tests and the list h200
#     bash examples/benchmarks/gpu.sh activations    # that list alone
#     bash examples/benchmarks/gpu.sh tests          # all of the GPU's tests, the model matrix too
# Variables: OUT (folder for results), PYTHON, MINUTES (of measuring), COMMIT (where git is not at hand).
set -uo pipefail
cd "$(dirname "$0")/../.."
list=${1:-h200}
out=${OUT:-runs/benchmarks}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

if compgen -G "wheels/*.whl" >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/wheels wheels/*.whl &&
        export PYTHONPATH="$PYTHONPATH:/tmp/wheels"
fi
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader

if [ "$list" = tests ]; then
    "$python" -m pytest tests/gpu -q -o addopts= -p no:cacheprovider 2>&1 | tee "$out/tests-gpu-all.txt"
    exit
fi
tests=0 minutes=9
if [ "$list" = h200 ]; then
    # A failing test must not cost the figures; its output comes back beside them.
    timeout 90 "$python" -m pytest tests/gpu/test_cuda.py -q -o addopts= -p no:cacheprovider 2>&1 | tee "$out/tests-gpu.txt"
    tests=$? minutes=6
    timeout 100 "$python" -m examples.benchmarks.foresight --size 1.5B --tokens 8192 --length 4096 --precision bf16-mixed \
        --checkpointing --windows 1:1 4:1 12:1 --seconds 5 --out "$out/rows.jsonl" 2>&1 | tee "$out/foresight.txt"
fi
"$python" -m examples.benchmarks --list "$list" --minutes "${MINUTES:-$minutes}" --out "$out" 2>&1 |
    tee "$out/progress-$list.txt"
measured=$?
exit $((tests ? tests : measured))
