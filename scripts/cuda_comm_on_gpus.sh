#!/usr/bin/env bash
# On a machine with 2 GPUs with NVLink: conformance and times of one kernel of `all_reduce`, by default that in CUDA.
#
#     scripts/cuda_comm_on_gpus.sh
#     KERNEL=custom_all_reduce.sgl_kernel BESIDE="triton.one_shot torch.distributed" scripts/cuda_comm_on_gpus.sh
#
# First the conformance of KERNEL with messages of up to MOST_ROWS (600) rows, then sums of SIZES (1 KB to 1 MB) are measured,
# twice each, by KERNEL and those BESIDE it. Both start at once, since imports take most of the time. SECONDS_IN_ALL (60)
# limit it, and SECONDS_FIRST (34) the conformance. PYTHONPATH may name folders of libraries. Logs and JSON go to $OUT.
# NVLink multicast stays off.
set -uo pipefail
cd "$(dirname "$0")/.."
RUN=${OUT:-build/cuda_comm}
mkdir -p "$RUN"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
export KERNELHUB_COMM_TIMEOUT_S=${KERNELHUB_COMM_TIMEOUT_S:-8}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export PYTHON=${PYTHON:-python3}
ALL=${SECONDS_IN_ALL:-60} FIRST=${SECONDS_FIRST:-34}
rm -f "$RUN/tested"
read -ra sizes <<<"${SIZES:-1024 4096 8192 16384 32768 65536 131072 262144 524288 1048576}"
read -ra kernels <<<"${KERNEL:=cuda.one_shot} ${BESIDE:-triton.one_shot torch.symm_mem_one_shot}"

(
    timeout --kill-after=3 "$FIRST" "$PYTHON" -m tests.gpu.comm_conformance all_reduce "$KERNEL" --ranks 2 \
        --calls 2000 --most-rows "${MOST_ROWS:-600}" --limit-s $((FIRST - 5)) >"$RUN/conformance.log" 2>"$RUN/conformance.err"
    echo "conformance: exit $?, at $SECONDS s" >>"$RUN/conformance.log"
    touch "$RUN/tested"
) &
timeout --kill-after=3 "$ALL" "$PYTHON" benchmarks/comm.py --ranks 2 --ops all_reduce --sizes "${sizes[@]}" \
    --kernels "${kernels[@]}" "${kernels[@]}" --after "$RUN/tested" --json "$RUN/sums.json" >"$RUN/sums.log" 2>"$RUN/sums.err"
echo "sums: exit $?, at $SECONDS s" >>"$RUN/sums.log"
"$PYTHON" scripts/summary_of_comm_run.py "$RUN/conformance.log" | cut -c1-400
for log in conformance sums; do
    [ ! -s "$RUN/$log.err" ] || tail -n 2 "$RUN/$log.err" | cut -c1-300
done
cut -c1-120 "$RUN/sums.log"
