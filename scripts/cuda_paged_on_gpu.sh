#!/usr/bin/env bash
# On one Hopper GPU, in at most 150 s: `cuda.paged_decode` against the reference and its contract, many calls with random
# lengths, some under compute-sanitizer's memcheck, its forms beside `triton.split_kv` and torch's sdpa, each compared with
# the reference before it is timed, and the host's time of eager calls. JSON and logs go into $OUT; a summary comes last.
#
# With TIMES=1 only a few checks and the times, in at most 80 s. FA3 is a folder with tokenspeed-fa3, if it is to be timed.
#
#   OUT=FOLDER scripts/cuda_paged_on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/cuda_paged}
TIMES=${TIMES:-}
LIMIT=${LIMIT:-$([ -n "$TIMES" ] && echo 78 || echo 148)}
# shellcheck source=scripts/one_gpu.sh
source scripts/one_gpu.sh
export PYTHONPATH=$PYTHONPATH:$PWD/scripts${FA3:+:$FA3}

check() {
    for part in 0 1 2; do timed "check$part" 30 "$PYTHON" scripts/measure_cuda_paged.py check --part "$part/3" & done
    wait
    [ -z "$TIMES" ] || return
    timed soak 30 "$PYTHON" -m tests.gluon.soak --here --kernels paged_attention/cuda.paged_decode \
        --calls "${SOAK:-3000}" --draws 6 &
    memcheck 30 paged_ tests.gpu.paged_sanitized &
    wait
}
rows() { # one that fails ends its process
    local at=0
    while [ "$(left 12)" -gt 0 ]; do
        timed "time$at" "$(left 2)" "$PYTHON" scripts/measure_cuda_paged.py time --seconds "$(left 7)" --out "$OUT/time.json"
        [ "$?" = 3 ] || break
        at=$((at + 1))
    done
}

# What compiles and what the GPU shows of numbers at once; then the times, alone.
check &
timed compile 62 "$PYTHON" scripts/measure_cuda_paged.py compile &
[ -n "$TIMES" ] || timed contract "${CONTRACT:-66}" "$PYTHON" -m pytest -v -p no:cacheprovider -n 8 -m gpu --tb=short \
    --maxfail=12 tests/gpu/test_cuda_paged_on_gpu.py &
wait
[ -n "$TIMES" ] || timed host 12 "$PYTHON" scripts/measure_cuda_paged.py host --out "$OUT/host.json"
rows
cat "$OUT"/check?.log | grep -E "^check: |WRONG|Error" | cut -c1-220 | sort | uniq -c | head -n 8
grep -E "Error|failed|\{'cuda.*'[A-Z]" "$OUT/compile.log" | cut -c1-300 | head -n 4
if [ -z "$TIMES" ]; then
    grep -E "passed|failed|^FAILED|^ERROR" "$OUT/contract.log" | cut -c1-200 | tail -n 6
    tail -n 1 "$OUT/soak.log" | cut -c1-300
    grep -hE "ERROR SUMMARY|Invalid|rror" "$OUT/memcheck.log" | cut -c1-160 | head -n 3
    grep -hE "^\{|Error" "$OUT/host.log" | cut -c1-420
fi
cat "$OUT"/time*.log | grep -E "^row|^[A-Za-z]*Error" | cut -c1-420
echo "== end, at $((SECONDS - STARTED)) s"
