#!/usr/bin/env bash
# On a machine with one GPU or more, in under 9 minutes: the tests that a GPU decides, the kernels against torch and the
# roofs, what choosing and launching cost, sums between GPUs where there are several, then the rest of the tests. Most
# valuable first, each part with a budget of its own; a part that runs out of it is reported as such, and what a benchmark
# had measured by then is kept. No part gets more than is left of ALL_SECONDS, and those for which nothing is left are
# passed over. Installs nothing. A short table comes last. Logs and JSON go into build/gpu; where $OUT is set,
# $OUT/run.tgz holds them too, after each part.
#
# Another call with the same sources goes on: parts that ended well are passed over, and tests that passed are left out.
# FRESH=1 begins anew. Every run of tests begins with one test of each kernel (tests/going_on.py).
set -uo pipefail
STARTED=$SECONDS
cd "$(dirname "$0")/.."
RUN=build/gpu KEPT=$PWD/build/gpu_kept
# Where packages have no bytecode and their folder cannot be written, each of many processes would compile torch anew.
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$KEPT/triton}  # of all workers and calls
PYTHON=${PYTHON:-python3}
read -r GPUS SOURCES <<<"$("$PYTHON" -c 'import torch, tests.going_on as on; print(max(1, torch.cuda.device_count()), on.sources())')"
if [ -n "${FRESH:-}" ] || [ -z "${SOURCES:-}" ] || [ "$(cat "$RUN/sources.txt" 2>/dev/null)" != "$SOURCES" ]; then
    rm -rf "$RUN"
fi
mkdir -p "$RUN" "$KEPT/compiled"
echo "${SOURCES:-}" >"$RUN/sources.txt"
echo call >>"$RUN/calls.txt"
CALL=$(wc -l <"$RUN/calls.txt")
touch "$RUN/parts.txt"
WORKERS=${WORKERS:-$((14 * GPUS))}  # they share the GPUs
ALL_SECONDS=${ALL_SECONDS:-520}  # of all parts, which is 9 minutes with the last table and what a killed part needs
# Most, of the tests that a GPU decides. A call that goes on has ended other parts.
TESTS_SECONDS=${TESTS_SECONDS:-$((CALL > 1 ? 300 : GPUS > 1 ? 230 : 125))}
FUZZ_SECONDS=${FUZZ_SECONDS:-20}  # of tests/fuzz; more find more
# With their seconds, in which each has some cases of all kinds (--quick). On an H200 none came to its end in them with
# all cases: name fewer benchmarks, with more seconds and CASES=, to have those whole. Others: grouped_gemm, indexer, quant.
BENCHMARKS=${BENCHMARKS:-moe:40 gemm:35 mla:35 attention:35 dispatch:40}
CASES=${CASES---quick}
CUT_OFF='^    |^$|KeyboardInterrupt|^Traceback|^\(to show'  # what a part that ran out of time says of that
IFS=, read -ra VISIBLE <<<"${CUDA_VISIBLE_DEVICES:-}"

gpu() { echo "${VISIBLE[$1]:-$1}"; }  # the I-th of those that may be used

pack() {
    [ -n "${OUT:-}" ] || return 0
    tar -czf "$OUT/.run.$BASHPID.tgz" -C "$RUN" . 2>/dev/null
    mv "$OUT/.run.$BASHPID.tgz" "$OUT/run.tgz"
}

ended() { grep -q "^$1 0 " "$RUN/parts.txt"; }

part() {  # part NAME SECONDS COMMAND...
    local name=$1 budget=$2 began=$SECONDS left=$((ALL_SECONDS - SECONDS + STARTED)) code
    if ended "$name"; then
        echo "== $name: has ended in an earlier call"
        return
    fi
    shift 2
    if [ "$left" -lt 5 ]; then
        echo "$name 124 0 0" >>"$RUN/parts.txt"
        echo "== $name: passed over, no time is left"
        return
    fi
    budget=$((budget < left ? budget : left))
    timeout --signal=INT --kill-after=10 "$budget" "$@" >"$RUN/$name.log" 2>&1
    code=$?
    echo "$name $code $((SECONDS - began)) $budget" >>"$RUN/parts.txt"
    printf '%s\n' "== $name: exit $code, $((SECONDS - began)) s of $budget" \
        "$(grep -avE "$CUT_OFF" "$RUN/$name.log" | tail -n "${LINES_SHOWN:-3}" | cut -c1-200)"
    pack
}

several() { [ "$GPUS" -gt 1 ]; }

beside() {  # part ...: at the same time as the parts that follow, until `wait`, where there are several GPUs
    if several; then part "$@" & else part "$@"; fi
}

# Tests end by themselves at their limit, and tell what failed so far: an interrupted parallel run tells nothing.
tests=("$PYTHON" -m pytest -q -p no:cacheprovider -n "$WORKERS" --maxfail=60 --tb=short)
# In the order of tests/going_on.py: pytest-xdist would begin with the largest groups.
# No `| grep -q`: it ends at the first match, and what wrote to it then fails, and with pipefail the condition.
[[ $("$PYTHON" -m pytest --help 2>/dev/null) == *--no-loadscope-reorder* ]] && tests+=(--no-loadscope-reorder)

tested() {  # NAME SECONDS SLACK ARGUMENT...: tests, which are given so many seconds to end in
    part "$1" "$(($2 + $3))" env TESTS_GPUS="$GPUS" COMPILED_FOR_TESTS="$KEPT/compiled" TESTS_PASSED="$RUN/$1.passed" \
        "${tests[@]}" --session-timeout "$2" "${@:4}" --junitxml "$RUN/$1.$CALL.xml"
}

rest() {  # the tests that no GPU decides, with what is left but 15 s, which are to end in
    local left=$((ALL_SECONDS - 15 - SECONDS + STARTED))
    if [ "$left" -ge 60 ]; then  # 14 processes take over 20 s to import torch and to find the tests
        tested other_tests "$left" 15 -m "not (gpu or device or ahead or sweep)" tests --ignore tests/backends
    elif ! ended other_tests; then
        echo "other_tests 124 0 0" >>"$RUN/parts.txt"
        echo "== other_tests: passed over, too little time is left"
    fi
}

decided=(tests/gpu tests/probes tests/backends tests/evidence tests/ops tests/runtime/test_seal.py)
tested gpu_tests "$TESTS_SECONDS" 40 -m "gpu or device" "${decided[@]}"
at=0
for named in $BENCHMARKS; do
    name=${named%:*}
    [ "$name" = dispatch ] && continue
    beside "$name" "${named#*:}" env CUDA_VISIBLE_DEVICES="$(gpu $((at % GPUS)))" "$PYTHON" "benchmarks/$name.py" \
        ${CASES:+"$CASES"} --out "$RUN/$name.json"
    at=$((at + 1))
    [ $((at % GPUS)) -gt 0 ] || wait
done
wait
for named in $BENCHMARKS; do
    [ "${named%:*}" != dispatch ] ||
        beside dispatch "${named#*:}" "$PYTHON" benchmarks/dispatch.py --out "$RUN/dispatch.json"
done
part host 35 env CUDA_VISIBLE_DEVICES="$(gpu $((GPUS - 1)))" "$PYTHON" benchmarks/host.py --rounds 1 --out "$RUN/host.json"
wait
if several; then
    part comm 35 "$PYTHON" benchmarks/comm.py --sizes 8192 1048576 33554432 --json "$RUN/comm.json"
    part comm_tests 55 "$PYTHON" -m pytest -q -p no:cacheprovider -n 0 --session-timeout 40 tests/gpu/test_comm_on_gpu.py \
        --junitxml "$RUN/comm_tests.$CALL.xml" &
fi
beside fuzz "$((FUZZ_SECONDS + 25))" env CUDA_VISIBLE_DEVICES="$(gpu 0)" "$PYTHON" -m tests.fuzz --device cuda \
    --seed "${FUZZ_SEED:-0}" --cases 100000 --seconds "$FUZZ_SECONDS" --jobs "${FUZZ_JOBS:-12}" --json "$RUN/fuzz.json"
# Its children need 15 s and more to import torch, beside others.
beside fuzz_values "$((FUZZ_SECONDS + 25))" env CUDA_VISIBLE_DEVICES="$(gpu $((GPUS - 1)))" KERNELHUB_CHECK=1 \
    "$PYTHON" -m tests.fuzz --device cuda --kinds metadata --cases 100000 --seconds "$FUZZ_SECONDS" \
    --jobs "${FUZZ_JOBS:-12}" --json "$RUN/fuzz_values.json"
rest
wait

"$PYTHON" scripts/record_verification.py --junit "$RUN"/gpu_tests.*.xml "$RUN"/other_tests.*.xml --out "$RUN/verification.json"
"$PYTHON" scripts/summary_of_gpu_run.py "$RUN"
result=$?
pack
exit $result
