#!/usr/bin/env bash
# On one Hopper GPU, in at most 150 s: `cuda.decode` against the reference and its contract, then beside `gluon.decode` and
# FlashMLA, each form compared with the reference before it is timed. JSON and logs go into $OUT; a summary comes last.
#
#   OUT=FOLDER WHEELS=FOLDER scripts/cuda_mla_on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/cuda_mla}
WHEELS=${WHEELS:-.gpu}
VENDORS=$PWD/build/vendors
mkdir -p "$OUT" "$VENDORS" build
PYTHON=${PYTHON:-python3}
STARTED=$SECONDS
LIMIT=${LIMIT:-150}
left() { echo $((LIMIT - SECONDS + STARTED - $1)); } # seconds until so many before the end
for wheel in "$WHEELS"/tokenspeed_flashmla-*.whl; do
    [ -f "$wheel" ] || { echo "no wheel: $wheel" && continue; }
    "$PYTHON" -m zipfile -e "$wheel" "$VENDORS"
done
export PYTHONPATH=$PWD:$VENDORS PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton_cache}

timed() { # NAME LIMIT COMMAND...: a child process with a time limit, its text in a log
    local name=$1 limit=$2
    [ "$limit" -gt 3 ] || { echo "== $name: no time left" && return 1; }
    timeout --signal=INT --kill-after=3 "$limit" "${@:3}" >"$OUT/$name.log" 2>&1
    local status=$?
    echo "== $name: exit $status, at $((SECONDS - STARTED)) s"
    return "$status"
}
least() { echo $(($1 < $2 ? $1 : $2)); }

timed check 45 "$PYTHON" scripts/measure_cuda_mla.py check
without=()
[ $? -eq 0 ] || without=(--without cuda)
grep -E "^check|^  rows|Error" "$OUT/check.log" | cut -c1-400
for part in 0 1 2 3; do
    timed "compile_$part" 40 "$PYTHON" scripts/measure_cuda_mla.py time --compile --part "$part/4" "${without[@]}" &
done
if [ ${#without[@]} -eq 0 ]; then
    timed contract "$(least "$(left 75)" 45)" "$PYTHON" -m pytest -q -p no:cacheprovider -n 8 -m gpu --tb=short --maxfail=12 \
        tests/gpu/test_cuda_decode_on_gpu.py &
fi
wait
tail -n 25 "$OUT/contract.log" 2>/dev/null | cut -c1-220
cat "$OUT"/compile_*.log | grep -v None | cut -c1-300 | head -n 6
timed time "$(left 14)" "$PYTHON" scripts/measure_cuda_mla.py time "${without[@]}" --seconds "$(left 24)" --out "$OUT/time.json"
timed host "$(least "$(left 1)" 14)" "$PYTHON" scripts/measure_cuda_mla.py host --out "$OUT/host.json"
grep -hE "^row|^\{|Error" "$OUT/time.log" "$OUT/host.log" | cut -c1-900
echo "== end, at $((SECONDS - STARTED)) s"
