#!/usr/bin/env bash
# On one Hopper GPU, in at most 100 s: ragged steps of `cuda.paged_decode`, and steps in one launch, against the reference
# and their contract, many calls with random lengths, some under compute-sanitizer's memcheck, and times beside
# `triton.split_kv`. Each part is a child with a time limit. JSON and logs go into $OUT; a summary comes last.
#
#   OUT=FOLDER LIMIT=100 scripts/cuda_paged_steps_on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/cuda_paged_steps}
LIMIT=${LIMIT:-100}
# shellcheck source=scripts/one_gpu.sh
source scripts/one_gpu.sh
export PYTHONPATH=$PYTHONPATH:$PWD/scripts
STEPS=scripts/measure_cuda_paged_steps.py
SOAK=(--here --kernels paged_attention/cuda.paged_decode --calls "${CALLS:-1500}" --draws 6)

contract() { # NAME LIMIT OPTION...
    timed "$1" "$2" "$PYTHON" -m pytest -v -p no:cacheprovider -n "${WORKERS:-4}" -m gpu --tb=short --maxfail=12 "${@:3}" \
        tests/gpu/test_cuda_paged_on_gpu.py
}
# Numbers, all at once; the compilations of the times among them. Then the times, alone.
for part in 0 1; do
    timed "check$part" 45 "$PYTHON" $STEPS check --part "$part/2" &
    timed "merging$part" 45 "$PYTHON" $STEPS check --part "$part/2" --merging &
done
timed compile 45 "$PYTHON" $STEPS compile &
contract ragged 58 -k "ragged or offsets" &
contract merging 58 -p tests.gpu.one_launch -k "graph or ragged or empty or long or sequences or strides or gives_what" &
(
    timed soak 40 "$PYTHON" -m tests.gluon.soak "${SOAK[@]}" --seed 100
    timed soak1 "$(least 30 "$(left 42)")" "$PYTHON" -m tests.gpu.one_launch tests.gluon.soak "${SOAK[@]}" --seed 200
) &
memcheck 45 paged_ tests.gpu.paged_sanitized &
wait
at=0
while [ "$(left 8)" -gt 0 ]; do # a row that fails ends its process
    timed "time$at" "$(left 2)" "$PYTHON" $STEPS time --seconds "$(left 6)" --out "$OUT/time.json"
    [ "$?" = 3 ] || break
    at=$((at + 1))
done
cat "$OUT"/check?.log "$OUT"/merging?.log | grep -E "^check: |WRONG|Error" | cut -c1-200 | sort | uniq -c | head -n 8
grep -E "Error" "$OUT/compile.log" | cut -c1-200 | head -n 3
for name in ragged merging; do
    echo "$name: $(grep -E " passed| failed" "$OUT/$name.log" | tail -n 1 | cut -c1-120), $(grep -c PASSED "$OUT/$name.log") passed"
    grep -E "^FAILED|^ERROR" "$OUT/$name.log" | cut -c1-180 | head -n 4
done
for name in soak soak1; do echo "$name: $(tail -n 1 "$OUT/$name.log" | cut -c1-240)"; done
grep -hE "ERROR SUMMARY|Invalid|rror" "$OUT/memcheck.log" | cut -c1-160 | head -n 3
cat "$OUT"/time*.log | grep -E "^row|^[A-Za-z]*Error" | cut -c1-200
echo "== end, at $((SECONDS - STARTED)) s"
