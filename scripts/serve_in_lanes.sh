#!/usr/bin/env bash
# Measures vLLM's serving with several attention backends at once, a server on each GPU of one machine.
#
#   MODEL=/models/llama8b RESULTS=/tmp/results scripts/serve_in_lanes.sh RUNS BACKEND[=EXTRA_PYTHONPATH] ...
#
# RUNS is a number of runs, or their numbers such as "2 3". GPUS names the GPUs, such as "0 1 2". Run r of backend i
# uses the GPU at place (i + r) modulo their number, since GPUs of one machine differ by some percent.
# Each run has a server of its own and each backend has caches of its own, so that its first run is the first start of a machine.
# CELLS, VLLM_CELLS, SERVER_OPTIONS, BUDGET (seconds of a run) and PRICE override what is measured. RESULTS/BACKEND.RUN.json are
# results of benchmarks/serving.py; RESULTS/BACKEND.RUN.log is what it and the server printed. A run that failed is named with
# the last line of its log, and the script ends with 1. GPUs are numbered as nvidia-smi does, whatever CUDA_VISIBLE_DEVICES says.
set -euo pipefail

runs=${1:?a number of runs, then the names of backends}
shift
backends=("$@")
[ $# -gt 0 ] || { echo "name the backends, such as CUSTOM FLASH_ATTN" >&2; exit 2; }
[[ $runs == *" "* ]] || runs=$(seq -s " " 0 $((runs - 1)))
present=$(nvidia-smi -L | wc -l)
cpus=$(($(nproc) / present))
read -ra gpus <<<"${GPUS:-$(seq -s " " 0 $((present - 1)))}"
: "${MODEL:?a folder with a model}" "${RESULTS:=build/serving}" "${BUDGET:=300}" "${PRICE:=2.5}"
: "${CELLS:=sharegpt@32x8,sharegpt@128x4,1k/1k@32,8k/1k@8,1k/1k@128,1k/8k@8x1,1k/1k@1}"
options='--load-format dummy --kernel-config {"enable_jit_warmup":false} --max-num-batched-tokens 8192 --gpu-memory-utilization 0.85'
options=${SERVER_OPTIONS:-$options}
mkdir -p "$RESULTS"
rm -f "$RESULTS/failed"

fail() { # status; of the run that a lane is in
    touch "$RESULTS/failed"
    echo "run $run of $backend on GPU $gpu ended with $1: $(grep . "$RESULTS/$backend.$run.log" | tail -n 1)"
}

lane() {
    local index=$1 backend=${2%%=*} extra="" run gpu
    [[ $2 == *=* ]] && extra=${2#*=}:
    for run in $runs; do
        gpu=${gpus[$(((index + run) % ${#gpus[@]}))]}
        (
            flock 9 # the backend before may still serve on this GPU
            echo "$gpu" >"$RESULTS/$backend.$run.gpu"
            cache=${TMPDIR:-/tmp}/lane.$backend
            mkdir -p "$cache/tmp"
            export CUDA_VISIBLE_DEVICES=$gpu PYTHONPATH=$extra${PYTHONPATH:-} TMPDIR=$cache/tmp
            export VLLM_CACHE_ROOT=$cache/vllm XDG_CACHE_HOME=$cache/xdg TORCHINDUCTOR_CACHE_DIR=$cache/inductor TRITON_CACHE_DIR=$cache/triton
            # vLLM 0.33 asks FlashInfer whether it can sample, and its engine ends where that is not installed.
            python3 -c 'import importlib.util as found; exit(found.find_spec("flashinfer") is None)' || export VLLM_USE_FLASHINFER_SAMPLER=0
            taskset -c "$((gpu * cpus))-$(((gpu + 1) * cpus - 1))" python3 benchmarks/serving.py --engine vllm --model "$MODEL" \
                --backends "$backend" --runs 1 --cells "$CELLS" --vllm-cells "${VLLM_CELLS:-}" --rounds 2 --warm-rounds 1 --warm-output 64 --max-len 9472 \
                --port "$((8100 + gpu))" --price "$PRICE" --budget "$BUDGET" --start-timeout 260 \
                --engine-options "$options" --out "$RESULTS/$backend.$run.json" >"$RESULTS/$backend.$run.log" 2>&1 ||
                fail "$?"
        ) 9>"${TMPDIR:-/tmp}/lane.gpu$gpu"
    done
}

for index in "${!backends[@]}"; do
    lane "$index" "${backends[$index]}" &
done
wait
python3 - "$RESULTS" <<'PYTHON'
import json, pathlib, sys

folder = pathlib.Path(sys.argv[1])
merged = {}
for path in sorted(folder.glob("*.[0-9]*.json")):
    backend, run, _ = path.name.split(".")
    gpu = int(path.with_suffix(".gpu").read_text()) if path.with_suffix(".gpu").exists() else None
    results = json.loads(path.read_text())
    merged.setdefault("machine", results["machine"])
    merged.setdefault("rows", []).extend({**row, "run": int(run), "gpu": gpu} for row in results["rows"])
(folder / "all.json").write_text(json.dumps(merged, indent=1) + "\n")
for row in merged.get("rows", []):
    print(*(row[key] for key in ("backend", "run", "gpu", "workload", "concurrency", "output_tokens_per_s", "itl_ms_p50", "server_start_s")))
PYTHON
[ ! -e "$RESULTS/failed" ]
