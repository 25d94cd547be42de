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
LIMIT=${LIMIT:-150}
# shellcheck source=scripts/one_gpu.sh
source scripts/one_gpu.sh
unpacked "${WHEELS:-.gpu}"/tokenspeed_deepgemm-*.whl
export DG_JIT_CACHE_DIR=$PWD/build/deep_gemm

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
memcheck 40 fp8_gemm tests.gpu.products_sanitized &
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
