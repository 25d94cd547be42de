#!/usr/bin/env bash
# Triton's tests again on Triton 3.6.0 and 3.9.0, the core on torch 2.8 and 2.11, each in an environment of its
# own under build/matrix. Older torch is the platform's default build, which on Linux brings CUDA packages.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
mkdir -p build/matrix

environment() {  # environment NAME REQUIREMENT...: made once, then kept
    local folder=build/matrix/$1
    shift
    if [ ! -e "$folder/ready" ]; then
        rm -rf "$folder"
        "$PYTHON" -m venv "$folder"
        for requirement in "$@"; do  # one after the other: each may replace what an earlier one pinned
            "$folder/bin/pip" install --quiet "$requirement"
        done
        "$folder/bin/pip" install --quiet packaging numpy pytest pytest-timeout pytest-xdist hypothesis rich tomli
        "$folder/bin/pip" install --quiet --no-deps -e .
        touch "$folder/ready"
    fi
}

result=0
run() {  # run NAME PYTEST-ARGUMENT...
    local name=$1
    shift
    echo "== $name"
    "build/matrix/$name/bin/python" -m pytest -q "$@" || result=1
}

TRITON_TESTS=(
    tests/backends/test_triton.py tests/backends/test_triton_details.py tests/backends/test_triton_mla.py
    tests/backends/test_triton_ahead.py
)
CORE_TESTS=(tests/dispatch tests/laws tests/probes tests/golden tests/cli tests/ops tests/contract tests/backends/test_torch.py)

for version in 3.6.0 3.9.0; do
    environment "triton-$version" torch==2.13.0 "triton==$version"
    run "triton-$version" "${TRITON_TESTS[@]}"
done
for version in 2.8.0 2.11.0; do
    environment "torch-$version" "torch==$version"
    run "torch-$version" "${CORE_TESTS[@]}"
done
exit $result
