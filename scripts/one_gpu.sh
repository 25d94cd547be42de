# Sourced by the scripts that check one CUDA kernel on one GPU, in the repository's root, after OUT (a folder) and LIMIT
# (seconds of the whole script) are set. Makes the folder, names the first visible GPU, and exports where caches are.
PYTHON=${PYTHON:-python3}
STARTED=$SECONDS
mkdir -p "$OUT" build
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 PYTHONPYCACHEPREFIX=$PWD/build/pycache
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$PWD/build/triton_cache}
export PATH=$PATH:/usr/local/cuda/bin
IFS=, read -ra gpus <<<"${CUDA_VISIBLE_DEVICES:-0}"
export CUDA_VISIBLE_DEVICES=${gpus[0]}

left() { echo $((LIMIT - SECONDS + STARTED - $1)); } # seconds until so many before the end
least() { echo $(($1 < $2 ? $1 : $2)); }

unpacked() { # WHEEL...: wheels of vendors, made importable
    local wheel vendors=$PWD/build/vendors
    mkdir -p "$vendors"
    for wheel; do
        [ -f "$wheel" ] || { echo "no wheel: $wheel" && continue; }
        "$PYTHON" -m zipfile -e "$wheel" "$vendors"
    done
    export PYTHONPATH=$PYTHONPATH:$vendors
}

timed() { # NAME LIMIT COMMAND...: a child process with a time limit, its text in a log
    local name=$1 limit=$2
    [ "$limit" -gt 3 ] || { echo "== $name: no time left" && return 1; }
    timeout --signal=INT --kill-after=3 "$limit" "${@:3}" >"$OUT/$name.log" 2>&1
    local status=$?
    echo "== $name: exit $status, at $((SECONDS - STARTED)) s"
    return "$status"
}

memcheck() { # LIMIT PREFIX MODULE: a module under compute-sanitizer, which looks at kernels whose names begin so
    local only=()
    [[ $(compute-sanitizer --help 2>&1) == *--kernel-regex* ]] && only=(--kernel-regex "kns=$2")
    timed memcheck "$1" compute-sanitizer --tool memcheck --report-api-errors no --print-limit 20 "${only[@]}" "$PYTHON" -m "$3"
}
