#!/usr/bin/env bash
# On a machine with 2 or 4 GPUs: what collectives and exchanges of tokens take, their conformance, compute-sanitizer.
#
#     scripts/verify_comm_on_gpus.sh [RANKS [PART...]]
#
# Parts, one after the other, or with TOGETHER=1 at once: `host`, `graphs`, `tiles`, `forms`, `quantised_forms`, and norms
# of the sizes WIDE, `wide_rows`, `wide_rows_early` and `early_forms`, measure; `compiled` compiles what those and the
# tests of the norm launch ahead, by all processors; `polled`, `clustered`, `quantised_one_shot` and `quantised_two_shot`
# test one kernel of the norm each, and `early_sum`, `early_one_shot`, `early_polled`, `early_clustered` and `early_eager`
# launches that begin early, as EARLY says (1); `pair` tests the quantised norm by two kernels, and compiles what
# `pair_forms` measures, with `quantised_host` for the host; processes of `push`, `sums`, `parts`,
# `norms`, `two_steps` and `sanitizer` (2 ranks; `memcheck` or `racecheck` alone) share two GPUs, but not more: there kernels would
# wait for ranks whose turn on their GPU it is not. Each process has LIMIT seconds (60), MARGIN of them (15) for imports
# and the answer; one that ends there is reported, and what it had found is kept. KERNELS and FORMATS name fewer for the sanitizer and for
# the quantised norms. Logs and JSON go into RUN (build/gpu_comm), and where $OUT is set into an archive of that name
# there. NVLink multicast stays off.
set -uo pipefail
cd "$(dirname "$0")/.."
RUN=${RUN:-build/gpu_comm}
rm -rf "$RUN"
mkdir -p "$RUN"
# Where packages have no bytecode and their folder cannot be written, each of many processes would compile torch anew.
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
export KERNELHUB_COMM_TIMEOUT_S=${KERNELHUB_COMM_TIMEOUT_S:-12}  # what the scene `missing` waits
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
PYTHON=${PYTHON:-python3}
RANKS=${1:-$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')}
PARTS=("${@:2}")
[ ${#PARTS[@]} -gt 0 ] || PARTS=(host graphs push sums parts norms sanitizer)
LIMIT=${LIMIT:-60}
MARGIN=${MARGIN:-15}
WIDE=${WIDE:---widths 7168 8192 4096 --rows 1 8 16 36 73 4 --few-rows 1 8 64 32}
MEASURED=${FORMATS:-fp8_group nvfp4} # forms of quantised norms
PAIR_WIDTHS=${PAIR_WIDTHS:-7168 4096 5120 8192}
STARTED=$SECONDS

part() {  # part NAME COMMAND...
    local name=$1 began=$SECONDS
    shift
    timeout --kill-after=5 "$LIMIT" "$@" >"$RUN/$name.log" 2>"$RUN/$name.err"
    local code=$?
    echo "== $name of $RANKS: exit $code, $((SECONDS - began)) s of $LIMIT, at $((SECONDS - STARTED)) s"
    "$PYTHON" scripts/summary_of_comm_run.py "$RUN/$name.log" | cut -c1-300
    [ "$code" = 0 ] || tail -n 3 "$RUN/$name.err" | cut -c1-300
    [ -z "${OUT:-}" ] || (flock 9; tar -czf "$OUT/$(basename "$RUN").tgz" -C "$RUN" .) 9>"$RUN/.lock"
}

experts() {  # experts NAME KERNEL ARGUMENTS...
    local name=$1 kernel=$2
    shift 2
    part "$name" "$PYTHON" -m tests.gpu.expert_conformance "$kernel" "$kernel" --ranks "$RANKS" \
        --limit-s "$((LIMIT - MARGIN))" "$@"
}

collective() {  # collective NAME OP KERNEL ARGUMENTS...
    local name=$1 op=$2 kernel=$3
    shift 3
    part "$name" "$PYTHON" -m tests.gpu.comm_conformance "$op" "$kernel" --ranks "$RANKS" --calls "${CALLS:-1000}" \
        --most-rows "${MOST_ROWS:-600}" --limit-s "$((LIMIT - MARGIN))" "$@"
}

sanitized() {  # sanitized TOOL KERNEL...: only functions named *_kernel, where the tool can tell them apart
    local tool=$1 only=()
    shift
    [[ $(compute-sanitizer --help 2>&1) == *--kernel-regex* ]] && only=(--kernel-regex kns=_kernel)
    # The CUDA runtime, NCCL and the launcher ask the driver for what it may refuse: no error of a kernel.
    part "$tool" compute-sanitizer --tool "$tool" --report-api-errors no --print-limit 1000 --target-processes all \
        "${only[@]}" "$PYTHON" -m tests.gpu.comm_sanitized --ranks "$RANKS" --limit-s "$((LIMIT - 6))" --only "$@"
}

beside() {  # beside COMMAND...: others that are under way, on two GPUs
    "$@" &
    [ "$RANKS" -le 2 ] || [ -n "${TOGETHER:-}" ] || wait
}

nvidia-smi --query-gpu=name --format=csv,noheader | sort | uniq -c
for which in "${PARTS[@]}"; do
    case $which in
        host) part host "$PYTHON" benchmarks/comm_host.py --ranks "$RANKS" --json "$RUN/host.json" ;;
        tiles) part tiles "$PYTHON" benchmarks/comm_tiles.py --ranks "$RANKS" --json "$RUN/tiles.json" ;;
        graphs)
            part graphs "$PYTHON" benchmarks/comm.py --ranks "$RANKS" --ops all_reduce all_reduce_rms_norm \
                --kernels triton.one_shot triton.two_shot --sizes 8192 65536 262144 1048576 --json "$RUN/graphs.json"
            ;;
        push)
            beside experts push triton.push --calls 1000 --scenes many side_streams delayed graphs again large missing \
                --dtypes bfloat16
            beside experts push_exchanges triton.push --scenes exchanges
            beside experts push_exact triton.push_exact --exact --calls 500 --scenes many side_streams delayed large exchanges
            ;;
        sums)
            beside collective all_reduce_one_shot all_reduce triton.one_shot
            beside collective all_reduce_two_shot all_reduce triton.two_shot
            beside collective norm_one_shot all_reduce_rms_norm triton.one_shot
            beside collective norm_two_shot all_reduce_rms_norm triton.two_shot
            ;;
        parts)
            beside collective gather all_gather triton.one_shot
            beside collective scatter reduce_scatter triton.one_shot
            ;;
        norms)
            for format in ${FORMATS:-fp8_group mxfp8 nvfp4 fp8_token fp8_tensor}; do
                beside collective "norm_$format" all_reduce_rms_norm triton.one_shot_quant --format "$format"
            done
            ;;
        two_steps)
            for format in ${FORMATS:-fp8_group mxfp8 nvfp4 fp8_token fp8_tensor}; do
                beside collective "two_steps_$format" all_reduce_rms_norm triton.two_shot_quant --format "$format"
            done
            ;;
        sanitizer)
            beside sanitized memcheck ${KERNELS:-triton}
            beside sanitized racecheck ${KERNELS:-triton}
            ;;
        compiled) # without GPUs, so that the limits of what follows are not spent on it
            CUDA_VISIBLE_DEVICES="" part compiled "$PYTHON" benchmarks/comm_norms.py --compile "$(nproc)" --ranks "$RANKS" \
                --widths 7168 4096 8192 5120 2880 --all-dtypes 7168 4096
            ;;
        clustered) beside collective clustered all_reduce_rms_norm triton.one_shot_clustered --hidden "${HIDDEN:-7168}" ;;
        early_sum) beside collective early_sum all_reduce triton.one_shot --change early="${EARLY:-1}" ;;
        early_one_shot | early_polled | early_clustered)
            kernel=triton.one_shot
            [ "$which" = early_one_shot ] || kernel=triton.one_shot_${which#early_}
            beside collective "$which" all_reduce_rms_norm "$kernel" --hidden "${HIDDEN:-7168}" \
                --change early="${EARLY:-1}" ${SCENES:+--scenes $SCENES}
            ;;
        early_eager) beside collective early_eager all_reduce_rms_norm triton.one_shot_clustered --hidden "${HIDDEN:-7168}" \
                --change early="${EARLY:-1}" eager=1 ${SCENES:+--scenes $SCENES} ;;
        early_forms)
            part early_forms "$PYTHON" benchmarks/comm_norms.py --ranks "$RANKS" --json "$RUN/early_forms.json" --set early \
                ${WIDE_FORMS:---widths 7168 8192 4096 5120 --rows 1 2 4 8 16 32 36 64 73 128 \
                --few-rows 1 2 4 8 16 32 36 64 73 128} --between-rows 1 16 73 --host
            ;;
        wide_rows) # the sum alone, what is selected and clusters; launches that begin early apart, as they are new
            part wide_rows "$PYTHON" benchmarks/comm_norms.py --ranks "$RANKS" --json "$RUN/wide_rows.json" $WIDE \
                --only selected clustered one_shot, --without apart launched bucket
            ;;
        wide_rows_early)
            part wide_rows_early "$PYTHON" benchmarks/comm_norms.py --ranks "$RANKS" --json "$RUN/wide_rows_early.json" \
                $WIDE --only selected one_shot_clustered launched --without apart place
            ;;
        polled) collective polled all_reduce_rms_norm triton.one_shot_polled --hidden "${HIDDEN:-7168}" ;;
        quantised_one_shot | quantised_two_shot) # not at once: formats one after the other in one process
            collective "$which" all_reduce_rms_norm "triton.${which#quantised_}_quant" --hidden "${HIDDEN:-7168}" \
                --format ${FORMATS:-fp8_group nvfp4}
            ;;
        forms) part forms "$PYTHON" benchmarks/comm_norms.py --ranks "$RANKS" --json "$RUN/forms.json" ;;
        quantised_forms)
            part quantised_forms "$PYTHON" benchmarks/comm_norms.py --ranks "$RANKS" --format ${FORMATS:-fp8_group nvfp4} \
                --widths 7168 4096 --rows 1 8 18 64 128 512 --few-rows 1 32 128 1024 --json "$RUN/quantised_forms.json"
            ;;
        pair) # at once: each sends few messages, and waits for the host most of the time
            for format in ${FORMATS:-fp8_group nvfp4 fp8_token fp8_tensor mxfp8}; do
                beside collective "pair_$format" all_reduce_rms_norm comm_pairs.sum_then_quant --format "$format"
            done
            beside part prepared "$PYTHON" benchmarks/comm_norms.py --ranks "$RANKS" --prepare --rows 8 --few-rows 8 \
                --format $MEASURED --widths $PAIR_WIDTHS
            ;;
        pair_forms)
            part pair_forms "$PYTHON" benchmarks/comm_norms.py --ranks "$RANKS" --format $MEASURED --against-nccl \
                --turns 4 --passes 3 --widths $PAIR_WIDTHS --rows ${ROWS:-1 16 64 256 1024 4096} --few-rows ${FEW_ROWS:-128 1024} \
                --without NCCL --json "$RUN/pair_forms.json"
            grep -q 'other bits' "$RUN/pair_forms.log" || # it was ended
                "$PYTHON" benchmarks/comm_norms.py --show "$RUN/pair_forms.json" | cut -c1-300
            ;;
        quantised_host)
            part quantised_host "$PYTHON" benchmarks/comm_host.py --ranks "$RANKS" --quantised \
                --json "$RUN/quantised_host.json"
            ;;
        memcheck | racecheck) beside sanitized "$which" ${KERNELS:-triton} ;;
    esac
    [ -n "${TOGETHER:-}" ] || wait
done
wait
echo "total $((SECONDS - STARTED)) s"
