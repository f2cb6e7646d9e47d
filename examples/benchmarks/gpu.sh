#!/usr/bin/env bash
# The first hour on a machine with a GPU and no network: calls of at most ten minutes, in the order of their worth.
#     bash examples/benchmarks/gpu.sh                # first light, memory, limits, 1.5B: one call
#     bash examples/benchmarks/gpu.sh next           # what has no row of the present code in examples/benchmarks/results yet, most
#                                                    # valuable first, in six minutes; the next call goes on
#     bash examples/benchmarks/gpu.sh 3B             # a part alone, in at most eight minutes: first, memory, limits, 1.5B, 3B,
#                                                    # 8B, card, foresight, h200, activations, trials (which has not run yet)
#     bash examples/benchmarks/gpu.sh tests1         # the GPU's tests in parts, tests1 to tests8: each at most ten minutes; these
#                                                    # need pytest and hypothesis, for which wheels/ is there
#     bash examples/benchmarks/gpu.sh ranks          # on a machine with several GPUs: 1, 2, 4 and 8 of them; has not run yet
#     bash examples/benchmarks/gpu.sh --pretend      # the first call on a CPU, with tiny sizes, in a folder that is removed
# Each part writes what it says to one file, NAME.txt, of at most 1 MiB, and its rows, as they come, to rows.jsonl.
# Variables: OUT (folder for results), PYTHON, MINUTES (of a list), COMMIT (where git is not at hand).
set -uo pipefail
cd "$(dirname "$0")/../.."
part=${1:-all}
out=${OUT:-runs/benchmarks}
python=${PYTHON:-python3}
patience=1
if [ "$part" = --pretend ]; then # its figures are of nothing, so they are not kept, and the machine may be busy
    patience=5
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi
mkdir -p "$out"
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}

if compgen -G "wheels/*.whl" >/dev/null; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade --target /tmp/wheels wheels/*.whl &&
        export PYTHONPATH="$PYTHONPATH:/tmp/wheels"
fi
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader

# run SECONDS NAME COMMAND…: what hangs is interrupted when the time is over, and killed ten seconds later. 124, 137: it was.
run() {
    local seconds=$(($1 * patience)) name=$2
    shift 2
    echo "== $name, at most $seconds s"
    timeout -s INT -k 10 "$seconds" "$@" 2>&1 | tee "$out/$name.txt"
    local status=${PIPESTATUS[0]}
    truncate -s "<1M" "$out/$name.txt"
    echo "== $name: exit status $status"
    return "$status"
}

# run_tests SECONDS NAME ARGUMENTS…: no test begins after so many seconds of this call, and what has run is reported
# (tests/gpu/conftest.py).
run_tests() {
    local seconds=$1 name=$2
    shift 2
    GPU_TEST_END=$(($(date +%s) + seconds)) run $((seconds + 20)) "$name" "$python" -m pytest -ra -v -o addopts= \
        -p no:cacheprovider --tb=short "$@"
}

# list NAME SECONDS: a list of agenda.py. What it begins ends in time, with a row that says so.
list() {
    local minutes=${MINUTES:-$(($2 / 60)).$(($2 % 60 * 10 / 60))}
    run $(($2 + 25)) "$1" "$python" -m examples.benchmarks --list "$1" --minutes "$minutes" --out "$out"
}

# First light takes about a minute. Its own limit, after which it says where it hangs, counts once everything is imported.
first() { run 115 first "$python" -m examples.benchmarks.first_light --seconds $((85 * patience)) --out "$out/rows.jsonl" "$@"; }
memory() { OMP_NUM_THREADS=${OMP_NUM_THREADS:-8} run 90 memory "$python" -m examples.benchmarks.beside_plan --out "$out" "$@"; }
limits() { run 45 limits "$python" -m examples.benchmarks.limits --out "$out/rows.jsonl" --rates "$out/rates.json" "$@"; }

cuda=tests/gpu/test_cuda.py models=tests/gpu/test_models.py
case $part in
all)
    first || exit # whoever reads a figure of what follows has to know that it computes the right thing
    memory --size 0.1B --tokens 8192 --length 1024 --seconds 4
    status=$?
    limits --seconds 16 || status=$?
    list 1.5B 300 || status=$?
    exit $status
    ;;
--pretend)
    first --pretend && memory --tokens 64 --seconds 0.1 && limits --seconds 0.4 && list pretend 120
    status=$?
    echo "left: $(cd "$out" && wc -l rows.jsonl) $(cd "$out" && echo *)"
    exit $status
    ;;
first) first ;;
memory) memory --size 0.1B --tokens 8192 --length 1024 --seconds 4 ;;
limits) limits --seconds 16 ;;
foresight)
    run 450 foresight "$python" -m examples.benchmarks.foresight --size 1.5B --tokens 16384 --length 4096 \
        --precision bf16-mixed --gradient-checkpointing --windows 1:1 2:1 4:1 4:2 12:1 --seconds 8 --out "$out/rows.jsonl"
    ;;
trials)
    run 455 trials "$python" -m examples.benchmarks.shared_base --accelerator gpu --rounds 1
    ;;
tests1) run_tests 560 tests1 tests/gpu/test_fork.py tests/gpu/test_user_code.py $cuda tests/gpu/test_delays.py -k "not bitwise" ;;
tests2) run_tests 560 tests2 $cuda::test_training_is_bitwise_equal ;;
tests3) run_tests 560 tests3 $cuda::test_updates_in_the_background_are_bitwise_those_of_the_step ;;
tests4) run_tests 560 tests4 $cuda::test_activations_are_bitwise_equal ;;
tests5) run_tests 560 tests5 $models -k "not bf16" ;;
tests6) run_tests 560 tests6 $models -k "bf16" ;;
tests7) run_tests 560 tests7 tests/gpu/test_compiled_blocks.py tests/gpu/test_sharing.py tests/gpu/test_steps_on_device.py ;;
tests8) run_tests 560 tests8 tests/gpu/test_plain_bits.py tests/gpu/test_layers_that_stay.py ;;
ranks)
    devices=$(command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus | wc -l || echo 1)
    numbers=$(for each in 1 2 4 8; do [ "$each" -le "$devices" ] && echo "$each"; done)
    run_tests 100 tests-ranks tests/gpu/test_several_devices.py -m "not long"
    # shellcheck disable=SC2086
    run 450 ranks "$python" -m examples.benchmarks.ranks --ranks $numbers --width 2048 --layers 24 --tokens 8192 \
        --out "$out/rows.jsonl"
    ;;
next) list next 330 ;;
*) list "$part" 455 ;;
esac
