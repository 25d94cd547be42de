#!/usr/bin/env bash
# Triton's tests again on the oldest and newest Triton, the core on older and newer torch and Python, each in an
# environment of its own under build/matrix. torch is the platform's default build, which on Linux brings CUDA packages.
# A Python that is not here is passed over, and said so.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p build/matrix

environment() {  # environment NAME PYTHON REQUIREMENT...: made once, then kept
    local folder=build/matrix/$1 python=$2
    shift 2
    if ! "$python" -c "" 2>/dev/null; then
        echo "== $folder: no $python here"
        return 1
    fi
    if [ ! -e "$folder/ready" ]; then
        rm -rf "$folder"
        "$python" -m venv "$folder"
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
    echo "== $name: $("build/matrix/$name/bin/python" -c "import sys, torch, triton; print(sys.version.split()[0], torch.__version__, triton.__version__)")"
    "build/matrix/$name/bin/python" -m pytest -q "$@" || result=1
}

CORE_TESTS=(
    tests/dispatch tests/laws tests/probes tests/golden tests/cli tests/ops tests/contract tests/compat
    tests/backends/test_torch.py tests/backends/test_cpp.py
)

for version in 3.6.0 3.9.0; do
    if environment "triton-$version" "${PYTHON:-python3}" torch==2.13.0 "triton==$version"; then
        run "triton-$version" tests/backends tests/gluon --ignore tests/backends/test_torch.py --ignore tests/backends/test_cpp.py
    fi
done
for pair in 2.8.0:python3.10 2.11.0:python3.12 2.14.0:python3.13; do
    if environment "torch-${pair%:*}" "${pair#*:}" "torch==${pair%:*}"; then
        run "torch-${pair%:*}" "${CORE_TESTS[@]}"
    fi
done
exit $result
