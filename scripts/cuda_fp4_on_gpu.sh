#!/usr/bin/env bash
# On one Hopper GPU, in at most 110 s: forms of `cuda.fp4_gemm` against float64, its contract, many calls of random sizes,
# memcheck of compute-sanitizer, and times beside `triton.fp4_gemm` and torch's bfloat16 product, each compared with
# float64 before it is timed. JSON and logs go into $OUT; a summary comes last.
#
#   OUT=FOLDER scripts/cuda_fp4_on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/cuda_fp4}
LIMIT=${LIMIT:-110}
# shellcheck source=scripts/one_gpu.sh
source scripts/one_gpu.sh

measure=("$PYTHON" scripts/measure_cuda_fp4.py)
timed compile 40 "${measure[@]}" compile &
compiling=$!
timed first 30 "${measure[@]}" check --only t64 &
first=$!
for part in 0 1 2 3; do timed "warm_$part" 40 "${measure[@]}" warm --part "$part/4" & done
wait "$first" # what hangs would hang again
firsts=$?
grep -E "^check|WRONG|Error" "$OUT/first.log" | cut -c1-200 | head -n 6
[ "$firsts" -lt 100 ] || { wait; echo "== check did not end"; exit 1; }
wait "$compiling"
timed check 26 "${measure[@]}" check --seconds 16
checked=$?
wait
[ "$checked" -lt 100 ] || { tail -n 3 "$OUT/check.log"; echo "== check did not end"; exit 1; }
timed contract "$(least "$(left 34)" 30)" "$PYTHON" -m pytest -v -p no:cacheprovider -n 8 -m gpu --tb=short --maxfail=12 \
    tests/gpu/test_cuda_fp4_on_gpu.py &
timed soak "$(least "$(left 34)" 28)" "$PYTHON" -m tests.gluon.soak --here --kernels fp4_gemm/cuda.fp4_gemm --calls 4000 --draws 16 &
memcheck 28 fp4_ tests.gpu.fp4_sanitized &
wait
timed time "$(left 7)" "${measure[@]}" time --seconds "$(left 13)" --out "$OUT/time.json"
timed host "$(least "$(left 0)" 12)" "${measure[@]}" host --out "$OUT/host.json"
grep -hE "FAILED|asked" "$OUT/compile.log" | cut -c1-200 | head -n 3
grep -hE "^check|WRONG|Error" "$OUT/check.log" | cut -c1-160 | tail -n 16
grep -E "passed|failed|^FAILED|^ERROR" "$OUT/contract.log" | cut -c1-180 | tail -n 6
tail -n 1 "$OUT/soak.log" | cut -c1-300
grep -hE "right|ERROR SUMMARY|Invalid|rror" "$OUT/memcheck.log" | cut -c1-120 | head -n 8
grep -hE "^row|Error" "$OUT/time.log" "$OUT/host.log" | cut -c1-420 | head -n 40
echo "== end, at $((SECONDS - STARTED)) s"
