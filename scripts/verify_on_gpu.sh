#!/usr/bin/env bash
# On a machine with a GPU, in under 9 minutes: the tests that a GPU decides, the kernels against torch and the roofs,
# what choosing and launching cost, sums between GPUs where there are several, then the rest of the tests. Most valuable
# first, each part with a budget of its own; a part that runs out of it is reported as such, and what a benchmark had
# measured by then is kept. No part gets more than is left of ALL_SECONDS, and those for which nothing is left are passed
# over. Installs nothing. A short table comes last. Logs and JSON go into build/gpu; where $OUT is set, $OUT/run.tgz
# holds them too, after each part.
set -uo pipefail
STARTED=$SECONDS
cd "$(dirname "$0")/.."
RUN=build/gpu
rm -rf "$RUN"
mkdir -p "$RUN"
# Where packages have no bytecode and their folder cannot be written, each of many processes would compile torch anew.
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
PYTHON=${PYTHON:-python3}
GPUS=$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')
WORKERS=${WORKERS:-$((14 * GPUS))}  # they share the GPUs
ALL_SECONDS=${ALL_SECONDS:-520}  # of all parts, which is 9 minutes with the last table and what a killed part needs
TESTS_SECONDS=${TESTS_SECONDS:-$((GPUS > 1 ? 45 : 135))}  # most, of the tests that a GPU decides
FUZZ_SECONDS=${FUZZ_SECONDS:-25}  # of tests/fuzz; more find more
# With their seconds, in which each has some cases of all kinds (--quick). On an H200 none came to its end in them with
# all cases: name fewer benchmarks, with more seconds and CASES=, to have those whole. Others: grouped_gemm, indexer, quant.
BENCHMARKS=${BENCHMARKS:-moe:45 gemm:35 mla:35 attention:35 dispatch:25}
CASES=${CASES---quick}

part() {  # part NAME SECONDS COMMAND...
    local name=$1 budget=$2 began=$SECONDS left=$((ALL_SECONDS - SECONDS + STARTED))
    shift 2
    if [ "$left" -lt 5 ]; then
        echo "$name 124 0 0" >>"$RUN/parts.txt"
        echo "== $name: passed over, no time is left"
        return
    fi
    budget=$((budget < left ? budget : left))
    timeout --signal=INT --kill-after=10 "$budget" "$@" >"$RUN/$name.log" 2>&1
    echo "$name $? $((SECONDS - began)) $budget" >>"$RUN/parts.txt"
    echo "== $name: exit $(tail -n 1 "$RUN/parts.txt" | cut -d' ' -f2), $((SECONDS - began)) s of $budget"
    tail -n "${LINES_SHOWN:-3}" "$RUN/$name.log" | cut -c1-200
    [ -z "${OUT:-}" ] || tar -czf "$OUT/run.tgz" -C "$RUN" .
}

# Tests end by themselves at their limit, and tell what failed so far: an interrupted parallel run tells nothing.
tests=(env TESTS_GPUS="$GPUS" "$PYTHON" -m pytest -q -p no:cacheprovider -n "$WORKERS" --maxfail=60 --tb=short)
# In the order of the folders below: pytest-xdist would begin with the largest groups, which are those of torch's kernels.
# No `| grep -q`: it ends at the first match, and what wrote to it then fails, and with pipefail the condition.
[[ $("$PYTHON" -m pytest --help 2>/dev/null) == *--no-loadscope-reorder* ]] && tests+=(--no-loadscope-reorder)
decided=(tests/gpu tests/probes tests/backends tests/evidence tests/ops tests/runtime/test_seal.py)
part gpu_tests "$((TESTS_SECONDS + 40))" "${tests[@]}" --session-timeout "$TESTS_SECONDS" -m "gpu or device" \
    "${decided[@]}" --junitxml "$RUN/gpu_tests.xml"
for named in $BENCHMARKS; do
    name=${named%:*}
    cases=()
    [ "$name" = dispatch ] || [ -z "$CASES" ] || cases=("$CASES")
    part "$name" "${named#*:}" "$PYTHON" "benchmarks/$name.py" "${cases[@]}" --out "$RUN/$name.json"
done
part host 40 "$PYTHON" benchmarks/host.py --rounds 1 --out "$RUN/host.json"
if [ "$GPUS" -gt 1 ]; then
    part comm_tests 55 "$PYTHON" -m pytest -q -p no:cacheprovider -n 0 --session-timeout 40 tests/gpu/test_comm_on_gpu.py \
        --junitxml "$RUN/comm_tests.xml"
    part comm 35 "$PYTHON" benchmarks/comm.py --sizes 8192 1048576 33554432 --json "$RUN/comm.json"
fi
part fuzz "$((FUZZ_SECONDS + 25))" "$PYTHON" -m tests.fuzz --device cuda --seed "${FUZZ_SEED:-0}" --cases 100000 \
    --seconds "$FUZZ_SECONDS" --jobs "${FUZZ_JOBS:-12}" --json "$RUN/fuzz.json"
part fuzz_values "$((FUZZ_SECONDS / 3 + 35))" env KERNELHUB_CHECK=1 "$PYTHON" -m tests.fuzz --device cuda --kinds metadata \
    --cases 100000 --seconds "$((FUZZ_SECONDS / 3))" --jobs "${FUZZ_JOBS:-12}" --json "$RUN/fuzz_values.json"
left=$((ALL_SECONDS - 15 - SECONDS + STARTED))  # 15 s to end in
if [ "$left" -ge 60 ]; then  # 14 processes take over 20 s to import torch and to find the tests
    part other_tests "$((left + 15))" "${tests[@]}" --session-timeout "$left" -m "not (gpu or device or ahead)" tests \
        --ignore tests/backends --junitxml "$RUN/other_tests.xml"
else
    echo "other_tests 124 0 0" >>"$RUN/parts.txt"
    echo "== other_tests: passed over, too little time is left"
fi

"$PYTHON" scripts/record_verification.py --junit "$RUN/gpu_tests.xml" "$RUN/other_tests.xml" --out "$RUN/verification.json"
"$PYTHON" scripts/summary_of_gpu_run.py "$RUN"
result=$?
[ -z "${OUT:-}" ] || tar -czf "$OUT/run.tgz" -C "$RUN" .
exit $result
