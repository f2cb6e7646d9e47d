#!/usr/bin/env bash
# Calls of ten minutes on a machine with a GPU and no network: wheels that came along, a list, the report.
#     bash examples/benchmarks/gpu.sh                # the GPU's tests of most worth, and the list h200
#     bash examples/benchmarks/gpu.sh activations    # that list alone
#     bash examples/benchmarks/gpu.sh ranks          # on a machine with several GPUs: 1, 2, 4 and 8 of them; has not run yet
#     bash examples/benchmarks/gpu.sh tests1         # the GPU's tests in parts, tests1 to tests6: each at most ten minutes
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
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader

# run_tests SECONDS NAME ARGUMENTS…: what has run when the time is over is reported (tests/gpu/conftest.py); a test that
# hangs is interrupted, then killed. The status is that of the tests; 2, 124 or 137: time was over.
run_tests() {
    local seconds=$1 name=$2
    shift 2
    GPU_TEST_SECONDS=$seconds timeout -s INT -k 10 $((seconds + 20)) "$python" -m pytest -ra -v -o addopts= \
        -p no:cacheprovider --tb=short "$@" 2>&1 | tee "$out/$name.txt"
}

cuda=tests/gpu/test_cuda.py models=tests/gpu/test_models.py
case $list in
tests1) run_tests 560 tests1 tests/gpu/test_delays.py tests/gpu/test_fork.py $cuda -k "not bitwise"; exit ;;
tests2) run_tests 560 tests2 $cuda::test_training_is_bitwise_equal; exit ;;
tests3) run_tests 560 tests3 $cuda::test_updates_in_the_background_are_bitwise_those_of_the_step; exit ;;
tests4) run_tests 560 tests4 $cuda::test_activations_are_bitwise_equal; exit ;;
tests5) run_tests 560 tests5 $models -k "not bf16"; exit ;;
tests6) run_tests 560 tests6 $models -k "bf16"; exit ;;
ranks)
    devices=$(command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus | wc -l || echo 1)
    numbers=$(for each in 1 2 4 8; do [ "$each" -le "$devices" ] && echo "$each"; done)
    run_tests 120 tests-ranks tests/gpu/test_several_devices.py -m "not long"
    # shellcheck disable=SC2086
    timeout 450 "$python" -m examples.benchmarks.ranks --ranks $numbers --width 2048 --layers 24 --tokens 8192 \
        --out "$out/rows.jsonl" 2>&1 | tee "$out/ranks.txt"
    exit
    ;;
esac

tests=0 minutes=9
if [ "$list" = h200 ]; then
    # A failing test must not cost the figures; its output comes back beside them. What only a GPU can show, and one model
    # of each kind with few slots, in both precisions.
    run_tests 90 tests-gpu $cuda tests/gpu/test_fork.py \
        -k "not bitwise or (training and 1-1 and (stack or vit or llama)) or (background and forward and stack)"
    tests=$? minutes=6
    timeout 100 "$python" -m examples.benchmarks.foresight --size 1.5B --tokens 8192 --length 4096 --precision bf16-mixed \
        --checkpointing --windows 1:1 4:1 12:1 --seconds 5 --out "$out/rows.jsonl" 2>&1 | tee "$out/foresight.txt"
fi
"$python" -m examples.benchmarks --list "$list" --minutes "${MINUTES:-$minutes}" --out "$out" 2>&1 |
    tee "$out/progress-$list.txt"
measured=$?
exit $((tests ? tests : measured))
