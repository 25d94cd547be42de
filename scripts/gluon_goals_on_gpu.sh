#!/usr/bin/env bash
# On one Hopper GPU, in at most 150 s: forms of `gluon.fp8_gemm` beside DeepGEMM, and of `gluon.decode` beside FlashMLA,
# each compared with the reference before it is timed; then Gluon's experts at small sizes under compute-sanitizer's
# memcheck, for which the GPU may be shared. With two GPUs in CUDA_VISIBLE_DEVICES that runs on the second beside the rest.
# JSON and logs go into $OUT after each case; the table comes last.
#
# WHEELS is a folder with both libraries' wheels: tokenspeed_deepgemm-2.5.0.post20260629 and
# tokenspeed_flashmla-1.0.0.post20260615 for CPython 3.12. They are unpacked into build/vendors. DeepGEMM needs nvcc.
#
#   OUT=FOLDER WHEELS=FOLDER scripts/gluon_goals_on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/gluon_goals}
WHEELS=${WHEELS:-.gpu}
VENDORS=$PWD/build/vendors
mkdir -p "$OUT" "$VENDORS" build
PYTHON=${PYTHON:-python3}
STARTED=$SECONDS
LIMIT=150
at() { echo "$((SECONDS - STARTED)) s"; }
left() { echo $((LIMIT - SECONDS + STARTED - $1)); } # seconds until so many before the end

for wheel in "$WHEELS"/tokenspeed_deepgemm-*.whl "$WHEELS"/tokenspeed_flashmla-*.whl; do
    [ -f "$wheel" ] || { echo "no wheel: $wheel" && continue; }
    "$PYTHON" -m zipfile -e "$wheel" "$VENDORS"
done
export PYTHONPATH=$PWD:$VENDORS PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton_cache} DG_JIT_CACHE_DIR=$PWD/build/deep_gemm
export PATH=$PATH:/usr/local/cuda/bin
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-0}"
export CUDA_VISIBLE_DEVICES=${gpus[0]}
nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c
echo "== unpacked, at $(at)"

timed() { # NAME LIMIT COMMAND...: a child process with a time limit, its text in a log
    local name=$1 limit=$2
    [ "$limit" -gt 3 ] || { echo "== $name: no time left" && return; }
    timeout --signal=INT --kill-after=3 "$limit" "${@:3}" >"$OUT/$name.log" 2>&1
    echo "== $name: exit $?, at $(at)"
}

# What is compiled once here is found in the caches later. Each process has a CUDA context of its own.
parts=$(($(nproc) < 16 ? 4 : 10))
for ((part = 0; part < parts; part++)); do
    timed "compile_product_$part" 34 "$PYTHON" scripts/measure_gluon_tiles.py --compile --only "product," \
        --part "$part/$parts" --seconds 24 &
done
for ((part = 0; part < 4; part++)); do
    timed "compile_decode_$part" 34 "$PYTHON" scripts/measure_gluon_mla.py --compile --only FlashMLA --part "$part/4" &
done
timed compile_experts 34 "$PYTHON" -m tests.gpu.experts_sanitized &
wait
cat "$OUT"/compile_product_*.log "$OUT"/compile_decode_*.log | grep -vE "^part|^[0-9]+ [0-9]+ $" | cut -c1-200 | sort | uniq -c | head -n 12
tail -n 2 "$OUT/compile_experts.log" | cut -c1-300

memcheck() { # GPU, LIMIT
    local only=()
    [[ $(compute-sanitizer --help 2>&1) == *--kernel-regex* ]] && only=(--kernel-regex kns=_kernel)
    CUDA_VISIBLE_DEVICES=$1 timed memcheck "$2" compute-sanitizer --tool memcheck --report-api-errors no --print-limit 100 \
        "${only[@]}" "$PYTHON" -m tests.gpu.experts_sanitized --seconds $(($2 - 12))
}

least() { echo $(($1 < $2 ? $1 : $2)); }

[ ${#gpus[@]} -gt 1 ] && memcheck "${gpus[1]}" 60 &
timed product "$(least "$(left 72)" 38)" "$PYTHON" scripts/measure_gluon_tiles.py --only "product," --seconds 28 --out "$OUT/product.json"
timed decode "$(least "$(left 38)" 36)" "$PYTHON" scripts/measure_gluon_mla.py --only FlashMLA --seconds 26 --out "$OUT/decode.json"
wait
[ ${#gpus[@]} -gt 1 ] || memcheck "${gpus[0]}" "$(least "$(left 3)" 60)"

grep -hE "^(product|beside)|^Traceback|Error" "$OUT/product.log" "$OUT/decode.log" | cut -c1-620
grep -E '^\{|ERROR SUMMARY|Invalid|rror' "$OUT/memcheck.log" | cut -c1-240 | head -n 14
echo "== end, at $(at)"
