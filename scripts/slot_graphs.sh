#!/bin/bash
# Eager calls of all ops on one GPU: right, and what they take of host and GPU, as graphs and kernel by kernel. 115 s.
# OUT=folder scripts/slot_graphs.sh
export PYTHONPATH=$PWD TRITON_CACHE_DIR=/tmp/slot_graphs_triton PYTHONPYCACHEPREFIX=/tmp/pyc
out=${OUT:-build/gpu_out}
mkdir -p "$out"
begin=$SECONDS
# Compiles what is measured while the tests run.
timeout 60 python3 benchmarks/host.py --here --seconds 0 > /dev/null 2> "$out/compile.log" &
compiling=$!
timeout 62 python3 -m pytest -q -n 8 -p no:cacheprovider tests/gpu/test_direct_launch_on_gpu.py > "$out/tests.log" 2>&1
echo "tests: rc $?, $(tail -1 "$out/tests.log"), $((SECONDS - begin)) s"
wait $compiling
echo "compiled: rc $?, $((SECONDS - begin)) s"
timeout $((114 - SECONDS + begin)) python3 benchmarks/host.py --ways own,kernels --seconds 0.05 --rounds 2 \
    --out "$out/host.json" > "$out/host.log" 2>&1
echo "host: rc $?, $((SECONDS - begin)) s"
grep -c . "$out/host.json"
