#!/usr/bin/env bash
# On a machine with a GPU, in under 9 minutes: the tests that a GPU decides, what choosing costs, the kernels
# against torch and the roofs, then the rest of the tests. Most valuable first, each part with a budget
# of its own; a part that runs out of it is reported as such. Installs nothing. A short table comes last; JSON
# and logs go under $OUT, or build/ where that is unset.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build}
mkdir -p "$OUT"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
PYTHON=${PYTHON:-python3}
WORKERS=${WORKERS:-14}
STARTED=$SECONDS

part() {  # part NAME SECONDS COMMAND...
    local name=$1 budget=$2 began=$SECONDS
    shift 2
    timeout --kill-after=10 "$budget" "$@" >"$OUT/$name.log" 2>&1
    echo "$name $? $((SECONDS - began)) $budget" >>"$OUT/parts.txt"
    echo "== $name: exit $(tail -n 1 "$OUT/parts.txt" | cut -d' ' -f2), $((SECONDS - began)) s of $budget"
    tail -n "${LINES_SHOWN:-3}" "$OUT/$name.log" | cut -c1-200
}

: >"$OUT/parts.txt"
tests=("$PYTHON" -m pytest -q -p no:cacheprovider -n "$WORKERS" --maxfail=60 --tb=short)
part gpu_tests 230 "${tests[@]}" -m "gpu or device" tests/gpu tests/probes tests/backends --junitxml "$OUT/gpu_tests.xml"
for benchmark in gemm moe mla grouped_gemm; do
    part "$benchmark" 50 "$PYTHON" "benchmarks/$benchmark.py" --out "$OUT/$benchmark.json"
done
part dispatch 50 "$PYTHON" benchmarks/dispatch.py --out "$OUT/dispatch.json"
for benchmark in attention indexer quant; do
    part "$benchmark" 45 "$PYTHON" "benchmarks/$benchmark.py" --out "$OUT/$benchmark.json"
done
left=$((525 - SECONDS + STARTED))
part other_tests "$((left > 20 ? left : 20))" "${tests[@]}" -m "not (gpu or device)" tests \
    --ignore tests/backends --junitxml "$OUT/other_tests.xml"

"$PYTHON" scripts/record_verification.py --junit "$OUT/gpu_tests.xml" "$OUT/other_tests.xml" --out "$OUT/verification.json"
"$PYTHON" scripts/summary_of_gpu_run.py "$OUT"
