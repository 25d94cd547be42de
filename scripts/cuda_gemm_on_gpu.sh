#!/usr/bin/env bash
# On one Hopper GPU, in at most 150 s: forms of `cuda.fp8_gemm` against the reference, its contract, many calls of random
# sizes, memcheck of compute-sanitizer, and times beside `gluon.fp8_gemm` and DeepGEMM, each compared with the reference
# before it is timed. JSON and logs go into $OUT; a summary comes last.
#
# WHEELS is a folder with tokenspeed_deepgemm-2.5.0.post20260629 for CPython 3.12, which needs nvcc.
#
#   OUT=FOLDER WHEELS=FOLDER scripts/cuda_gemm_on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/cuda_gemm}
WHEELS=${WHEELS:-.gpu}
VENDORS=$PWD/build/vendors
mkdir -p "$OUT" "$VENDORS" build
PYTHON=${PYTHON:-python3}
STARTED=$SECONDS
LIMIT=${LIMIT:-150}
left() { echo $((LIMIT - SECONDS + STARTED - $1)); } # seconds until so many before the end
least() { echo $(($1 < $2 ? $1 : $2)); }
for wheel in "$WHEELS"/tokenspeed_deepgemm-*.whl; do
    [ -f "$wheel" ] || { echo "no wheel: $wheel" && continue; }
    "$PYTHON" -m zipfile -e "$wheel" "$VENDORS"
done
export PYTHONPATH=$PWD:$VENDORS PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton_cache} DG_JIT_CACHE_DIR=$PWD/build/deep_gemm
export PATH=$PATH:/usr/local/cuda/bin
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-0}"
export CUDA_VISIBLE_DEVICES=${gpus[0]}

timed() { # NAME LIMIT COMMAND...: a child process with a time limit, its text in a log
    local name=$1 limit=$2
    [ "$limit" -gt 3 ] || { echo "== $name: no time left" && return 1; }
    timeout --signal=INT --kill-after=3 "$limit" "${@:3}" >"$OUT/$name.log" 2>&1
    local status=$?
    echo "== $name: exit $status, at $((SECONDS - STARTED)) s"
    return "$status"
}
memcheck() {
    local only=()
    [[ $(compute-sanitizer --help 2>&1) == *--kernel-regex* ]] && only=(--kernel-regex kns=fp8_gemm)
    timed memcheck 40 compute-sanitizer --tool memcheck --report-api-errors no --print-limit 20 "${only[@]}" \
        "$PYTHON" -m tests.gpu.products_sanitized
}

parts=$(($(nproc) < 16 ? 3 : 14))
for ((part = 0; part < parts; part++)); do
    timed "compile_$part" 45 "$PYTHON" scripts/measure_cuda_gemm.py compile --part "$part/$parts" --seconds 36 &
done
timed check 45 "$PYTHON" scripts/measure_cuda_gemm.py check
checked=$?
wait
grep -E "^check|^  |Error" "$OUT/check.log" | cut -c1-300 | tail -n 24
[ "$checked" -lt 100 ] || { echo "== check did not end" && exit 1; } # what hangs would hang again
timed contract "$(least "$(left 70)" 45)" "$PYTHON" -m pytest -v -p no:cacheprovider -n 6 -m gpu --tb=short --maxfail=12 \
    tests/gpu/test_cuda_products_on_gpu.py &
timed soak "$(least "$(left 70)" 40)" "$PYTHON" -m tests.gluon.soak --here --kernels fp8_gemm/cuda.fp8_gemm --calls 3000 --draws 24 &
memcheck &
wait
nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader -lms 250 >"$OUT/clocks.log" 2>&1 &
clocks=$!
timed time "$(left 10)" "$PYTHON" scripts/measure_cuda_gemm.py time --seconds "$(left 16)" --out "$OUT/time.json"
kill "$clocks"
timed eager "$(left 1)" "$PYTHON" scripts/measure_cuda_gemm.py eager --out "$OUT/eager.json"
cat "$OUT"/compile_*.log | grep -vE "^part|^compiled" | cut -c1-200 | sort | uniq -c | head -n 6
grep -E "passed|failed|^FAILED|^ERROR" "$OUT/contract.log" | cut -c1-180 | tail -n 4
tail -n 1 "$OUT/soak.log" | cut -c1-300
grep -hE "ERROR SUMMARY|Invalid|rror|WRONG" "$OUT/memcheck.log" | cut -c1-160 | head -n 4
grep -hE "rows|Error" "$OUT/time.log"  | cut -c1-620 | head -n 36
tail -n 1 "$OUT/eager.log" | cut -c1-900
cut -d, -f1 "$OUT/clocks.log" | sort | uniq -c | sort -rn | head -n 6
echo "== end, at $((SECONDS - STARTED)) s"
