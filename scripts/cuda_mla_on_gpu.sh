#!/usr/bin/env bash
# On one Hopper GPU, in at most 190 s: `cuda.decode` against the reference and its contract, many calls with random lengths,
# one under compute-sanitizer's memcheck, its forms beside `gluon.decode` and FlashMLA, each compared with the reference
# before it is timed, and the host's time of eager calls. JSON and logs go into $OUT; a summary comes last.
#
#   OUT=FOLDER WHEELS=FOLDER scripts/cuda_mla_on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/cuda_mla}
LIMIT=${LIMIT:-190}
# shellcheck source=scripts/one_gpu.sh
source scripts/one_gpu.sh
unpacked "${WHEELS:-.gpu}"/tokenspeed_flashmla-*.whl

timed compile 50 "$PYTHON" scripts/measure_cuda_mla.py compile &
compiling=$!
timed few 45 "$PYTHON" scripts/measure_cuda_mla.py few &
timed check 45 "$PYTHON" scripts/measure_cuda_mla.py check
wait "$compiling"
# 82 tests of the contract and 6 of any lengths; with four workers 58 took 34 s beside the soak and memcheck.
timed contract "$(least "$(left 70)" 100)" "$PYTHON" -m pytest -v -p no:cacheprovider -n 10 -m gpu --tb=short \
    --maxfail=12 tests/gpu/test_cuda_decode_on_gpu.py &
timed soak "$(least "$(left 62)" 40)" "$PYTHON" -m tests.gluon.soak --here --kernels mla_attention/cuda.decode --calls 20000 --draws 20 &
memcheck 28 mla_ tests.gpu.decode_sanitized &
wait
timed time "$(left 16)" "$PYTHON" scripts/measure_cuda_mla.py time --seconds "$(left 24)" --out "$OUT/time.json"
timed host "$(least "$(left 1)" 20)" "$PYTHON" scripts/measure_cuda_mla.py host --out "$OUT/host.json"
grep -E "^check: |WRONG|Error" "$OUT/check.log" | cut -c1-200 | head -n 4
grep -E "passed|failed|^FAILED|^ERROR" "$OUT/contract.log" | cut -c1-180 | tail -n 3
tail -n 1 "$OUT/soak.log" | cut -c1-300
grep -hE "ERROR SUMMARY|Invalid|rror" "$OUT/memcheck.log" | cut -c1-160 | head -n 3
grep -hE "^row|^\{|Error" "$OUT/time.log" "$OUT/host.log" | cut -c1-760 | head -n 16
echo "== end, at $((SECONDS - STARTED)) s"
