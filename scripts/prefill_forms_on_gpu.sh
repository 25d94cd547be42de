#!/usr/bin/env bash
# On one or several Hopper GPUs of a machine, in under 4 minutes, what `gluon.prefill_pipelined` has to show after a
# change: the tests of its contract, a soak of its two ops beside each other, and its times beside Triton's, torch's and
# FlashAttention-3's, if that is installed. With several GPUs the parts run at once, times on all but the first GPU. JSON
# and logs go into $OUT.
#
#   OUT=FOLDER scripts/prefill_forms_on_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-build/prefill_forms}
mkdir -p "$OUT" build
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton_cache}
PYTHON=${PYTHON:-python3}
STARTED=$SECONDS
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    IFS=, read -ra gpus <<<"$CUDA_VISIBLE_DEVICES"
else
    mapfile -t gpus < <(nvidia-smi --query-gpu=index --format=csv,noheader)
fi
[ ${#gpus[@]} -gt 0 ] || { echo "no GPU" >&2 && exit 2; }
cpus=$(nproc)
workers=$((cpus < 14 ? cpus : 14))
at() { echo "$((SECONDS - STARTED)) s"; }

contract() { # GPU, limit
    CUDA_VISIBLE_DEVICES=$1 timeout --signal=INT --kill-after=3 "$2" "$PYTHON" -m pytest -q -p no:cacheprovider -n "$workers" \
        --tb=short --session-timeout $(($2 - 4)) tests/gpu/test_gluon_on_gpu.py -k "Pipelined or pipelined" --durations 5 \
        --junitxml "$OUT/contract.xml" >"$OUT/contract.log" 2>&1
    echo "== contract: exit $?, at $(at): $(tail -n 1 "$OUT/contract.log" | cut -c1-150)"
    grep -hE "^(FAILED|ERROR)" "$OUT/contract.log" | cut -c1-220 | head -n 12
}

soak() { # GPU, limit
    CUDA_VISIBLE_DEVICES=$1 timeout --kill-after=3 "$2" "$PYTHON" -m tests.gluon.soak --together --calls 1000 --draws 3 \
        --seconds $(($2 - 4)) --json "$OUT/soak.json" --kernels attention/prefill_pipelined_any \
        paged_attention/prefill_pipelined_any >"$OUT/soak.log" 2>&1
    echo "== soak: exit $?, at $(at)"
    cut -c1-240 "$OUT/soak.log" | tail -n 6
}

compile() { # GPU
    local part
    for ((part = 0; part < workers; part++)); do
        CUDA_VISIBLE_DEVICES=$1 timeout --kill-after=2 70 "$PYTHON" scripts/measure_prefill_forms.py --compile \
            --part "$part/$workers" >"$OUT/compile_$part.log" 2>&1 &
    done
    wait
    cat "$OUT"/compile_*.log | grep -v "^part" | cut -c1-240 | sort | uniq -c | head -n 12
    echo "== compiled, at $(at)"
}

times() { # limit, GPUs
    local limit=$1 part=0 count=$(($# - 1)) gpu
    for gpu in "${@:2}"; do
        CUDA_VISIBLE_DEVICES=$gpu timeout --signal=INT --kill-after=3 "$limit" "$PYTHON" scripts/measure_prefill_forms.py \
            --part "$part/$count" --seconds $((limit - 12)) --out "$OUT/times_$part.json" >"$OUT/times_$part.log" 2>&1 &
        part=$((part + 1))
    done
    wait
    cat "$OUT"/times_*.log | cut -c1-420
    echo "== times, at $(at)"
}

compile "${gpus[0]}"
if [ ${#gpus[@]} -gt 1 ]; then
    (contract "${gpus[0]}" 90; soak "${gpus[0]}" 60) &
    (times $((225 - SECONDS + STARTED)) "${gpus[@]:1}") &
    wait
else
    contract "${gpus[0]}" 80
    soak "${gpus[0]}" 45
    times $((230 - SECONDS + STARTED)) "${gpus[0]}"
fi
echo "== end, at $(at)"
