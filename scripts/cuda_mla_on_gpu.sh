#!/usr/bin/env bash
# On one Hopper GPU, in at most 190 s: `cuda.decode` against the reference and its contract, many calls with random lengths,
# one under compute-sanitizer's memcheck, its forms beside `gluon.decode` and FlashMLA, each compared with the reference
# before it is timed, and the host's time of eager calls. JSON and logs go into $OUT; a summary comes last.
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
LIMIT=${LIMIT:-190}
left() { echo $((LIMIT - SECONDS + STARTED - $1)); } # seconds until so many before the end
for wheel in "$WHEELS"/tokenspeed_flashmla-*.whl; do
    [ -f "$wheel" ] || { echo "no wheel: $wheel" && continue; }
    "$PYTHON" -m zipfile -e "$wheel" "$VENDORS"
done
export PYTHONPATH=$PWD:$VENDORS PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton_cache}
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
least() { echo $(($1 < $2 ? $1 : $2)); }
memcheck() {
    local only=()
    [[ $(compute-sanitizer --help 2>&1) == *--kernel-regex* ]] && only=(--kernel-regex kns=mla_)
    timed memcheck 28 compute-sanitizer --tool memcheck --report-api-errors no --print-limit 20 "${only[@]}" \
        "$PYTHON" -m tests.gpu.decode_sanitized
}

timed compile 50 "$PYTHON" scripts/measure_cuda_mla.py compile &
compiling=$!
timed few 45 "$PYTHON" scripts/measure_cuda_mla.py few &
timed check 45 "$PYTHON" scripts/measure_cuda_mla.py check
wait "$compiling"
# 82 tests of the contract and 6 of any lengths; with four workers 58 took 34 s beside the soak and memcheck.
timed contract "$(least "$(left 70)" 100)" "$PYTHON" -m pytest -v -p no:cacheprovider -n 10 -m gpu --tb=short \
    --maxfail=12 tests/gpu/test_cuda_decode_on_gpu.py &
timed soak "$(least "$(left 62)" 40)" "$PYTHON" -m tests.gluon.soak --here --kernels mla_attention/cuda.decode --calls 20000 --draws 20 &
memcheck &
wait
timed time "$(left 16)" "$PYTHON" scripts/measure_cuda_mla.py time --seconds "$(left 24)" --out "$OUT/time.json"
timed host "$(least "$(left 1)" 20)" "$PYTHON" scripts/measure_cuda_mla.py host --out "$OUT/host.json"
grep -E "^check: |WRONG|Error" "$OUT/check.log" | cut -c1-200 | head -n 4
grep -E "passed|failed|^FAILED|^ERROR" "$OUT/contract.log" | cut -c1-180 | tail -n 3
tail -n 1 "$OUT/soak.log" | cut -c1-300
grep -hE "ERROR SUMMARY|Invalid|rror" "$OUT/memcheck.log" | cut -c1-160 | head -n 3
grep -hE "^row|^\{|Error" "$OUT/time.log" "$OUT/host.log" | cut -c1-760 | head -n 16
echo "== end, at $((SECONDS - STARTED)) s"
