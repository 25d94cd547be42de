#!/usr/bin/env bash
# On one Hopper GPU, in under 100 s: `forms` times forms of fp4_gemm for few rows beside the kernel of all sizes, and
# checks them beside float64; `contract` runs the tests of fp4_gemm and times what is selected. JSON and logs go into
# $OUT. MARLIN is a folder with vLLM, whose Marlin is timed too if it loads.
#
#   OUT=FOLDER scripts/float4_on_gpu.sh [forms|contract]
set -uo pipefail
cd "$(dirname "$0")/.."
what=${1:-forms}
OUT=${OUT:-build/float4}
mkdir -p "$OUT" build
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton_cache}
PYTHON=${PYTHON:-python3}
STARTED=$SECONDS
parts=$(($(nproc) < 16 ? $(nproc) : 16))
options=()
if [ "$what" = contract ]; then
    options=(--selected)
    timeout --signal=INT --kill-after=3 66 "$PYTHON" -m pytest -q -p no:cacheprovider -n $((parts < 14 ? parts : 14)) --tb=short \
        --session-timeout 62 tests/gpu/test_fp4_gemm_on_gpu.py tests/backends/test_triton.py tests/backends/test_fp4.py \
        tests/ops/test_largest_scales.py tests/ops/test_scales_far_apart.py -k "fp4 or Fp4" --durations 5 \
        --junitxml "$OUT/contract.xml" >"$OUT/contract.log" 2>&1
    echo "== contract: exit $?, at $((SECONDS - STARTED)) s: $(tail -n 1 "$OUT/contract.log" | cut -c1-150)"
    grep -hE "^(FAILED|ERROR)" "$OUT/contract.log" | cut -c1-220 | head -n 12
else
    for ((part = 0; part < parts; part++)); do
        timeout --kill-after=2 42 "$PYTHON" scripts/measure_float4.py --compile --part "$part/$parts" \
            >"$OUT/compile_$part.log" 2>&1 &
    done
    wait
    cat "$OUT"/compile_*.log | cut -c1-260 | sort | uniq -c | head -n 20
    echo "== compiled in $parts processes, at $((SECONDS - STARTED)) s"
fi
left=$((98 - SECONDS + STARTED))
timeout --signal=INT --kill-after=2 $left "$PYTHON" scripts/measure_float4.py --seconds $((left - 14)) "${options[@]}" \
    ${MARLIN:+--marlin "$MARLIN"} --out "$OUT/float4.json" 2>&1 | tee "$OUT/measure.log" | cut -c1-320
echo "== end, at $((SECONDS - STARTED)) s"
