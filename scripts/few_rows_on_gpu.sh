#!/usr/bin/env bash
# On one Hopper GPU, in at most LIMIT seconds (110): the forms of `cuda.fp8_gemm` for few rows against the reference,
# their contract, and times of each beside the other forms, `gluon.fp8_gemm`, `triton.fp8_gemm` and DeepGEMM. Forms that
# were not right are not timed. time.json, alternate.json, table.txt with the times of all, and logs.tgz go into $OUT; a
# summary with the fastest forms of each size comes last.
#
# WHEELS is a folder with tokenspeed_deepgemm-2.5.0.post20260629 for CPython 3.12, which needs nvcc. ROWS=1,8,16 times these
# numbers of rows alone.
#
#   OUT=FOLDER WHEELS=FOLDER scripts/few_rows_on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
RESULTS=${OUT:-build/few_rows}
OUT=$PWD/build/few_rows_logs
LIMIT=${LIMIT:-110}
# shellcheck source=scripts/one_gpu.sh
source scripts/one_gpu.sh
unpacked "${WHEELS:-.gpu}"/tokenspeed_deepgemm-*.whl
export DG_JIT_CACHE_DIR=$PWD/build/deep_gemm OMP_NUM_THREADS=2
notes=$PWD/build/few_rows_notes
rm -rf "$notes" "$OUT"
mkdir -p "$notes" "$OUT" "$RESULTS"

CHECKS=${CHECKS:-6}
COMPILES=${COMPILES:-$(least $(($(nproc) * 3 / 4)) 12)}
COMPILE_SECONDS=${COMPILE_SECONDS:-42}
MEASURE=("$PYTHON" scripts/measure_few_rows.py --folder "$notes" --rows "${ROWS:-}")
FORCED=${FORCED:-"64x64 p2,64x128 p2,64x128 p4,128x64 p2,128x128 p2 s2,192x128 p2 s2"}
IFS=, read -ra forced <<<"$FORCED"

check() { # PART: what a process that was stopped had not begun is done by another
    local part=$1
    timed "check_$part" "$(least "$(left 60)" 42)" "${MEASURE[@]}" check --part "$part/$CHECKS" && return
    timed "check_again_$part" "$(least "$(left 55)" 18)" "${MEASURE[@]}" check --part "$part/$CHECKS"
}
checks=()
for ((part = 0; part < CHECKS; part++)); do
    check "$part" &
    checks+=($!)
done
others=()
for ((part = 0; part < COMPILES; part++)); do
    timed "compile_$part" "$(least "$(left 52)" $((COMPILE_SECONDS + 12)))" nice -n 10 "${MEASURE[@]}" compile --part "$part/$COMPILES" \
        --seconds "$(least "$(left 62)" "$COMPILE_SECONDS")" &
    others+=($!)
done
wait "${checks[@]}"
echo "== checked, at $((SECONDS - STARTED)) s"
for name in "${forced[@]}"; do
    timed "contract_${name// /_}" "$(least "$(left 52)" 25)" "$PYTHON" -m tests.gpu.products_forced "$name" -q --tb=short --maxfail=6 &
    others+=($!)
done
timed bits "$(least "$(left 52)" 25)" "$PYTHON" -m pytest -q -n 0 -p no:cacheprovider -m gpu --tb=short --maxfail=6 \
    tests/gpu/test_cuda_products_on_gpu.py -k same_bits &
others+=($!)
wait "${others[@]}"
echo "== compiled, contract, at $((SECONDS - STARTED)) s"
packed() { tar czf "$RESULTS/logs.tgz" -C "$PWD/build" few_rows_logs few_rows_notes; }
packed
nvidia-smi --query-gpu=clocks.sm,power.draw --format=csv,noheader -lms 250 >"$OUT/clocks.log" 2>&1 &
clocks=$!
for try in 1 2 3; do
    [ "$(left 4)" -gt 8 ] || break
    timed "time_$try" "$(left 3)" "${MEASURE[@]}" time --seconds "$(left 11)" --out "$RESULTS/time.json" && break
done
kill "$clocks" 2>/dev/null
packed
# --- what was found
cat "$OUT"/check_*.log | grep -vE "^  .*at the same time" | cut -c1-260 | head -n 40
cat "$OUT"/check_*.log | grep "at the same time" | cut -c1-90 | sort -u
for name in "${forced[@]/#/contract_}" bits; do
    echo "$name: $(grep -hE "passed|failed|^FAILED|^ERROR" "$OUT/${name// /_}.log" | cut -c1-160 | tail -n 4 | tr '\n' ' ')"
done
cat "$OUT"/compile_*.log | grep -E "rror" | cut -c1-160 | sort | uniq -c | head -n 4
cat "$OUT"/time_*.log | grep -E "^[0-9]+ x" >"$RESULTS/table.txt"
cat "$OUT"/time_*.log | grep -E "^4096|each alone|WRONG|Error|^not right|cases," | grep -v "^>" | cut -c1-130 | head -n 20
cat "$OUT"/time_*.log | grep "^>" | cut -c3-170 | head -n "${LINES_SHOWN:-44}"
cut -d, -f1 "$OUT/clocks.log" | sort | uniq -c | sort -rn | head -n 4
echo "== end, at $((SECONDS - STARTED)) s"
