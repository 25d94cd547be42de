# Sourced by the scripts that run an engine on a GPU.

# engine_site VARIABLE ENTRY_POINT_GROUP PLUGIN WORK PACKAGE...
# Makes the engine importable that $VARIABLE names: a folder with it and what it needs beside torch, or an archive of one
# (tar.xz), unpacked in WORK; an installed engine if it is empty. This checkout, which is not installed, gets the metadata
# by which engines find the plugin. Exports PYTHONPATH; fails, and says why, if a package, the plugin or the GPU is missing.
engine_site() {
    local variable=$1 group=$2 plugin=$3 work=$4 site=${!1} folder
    shift 4
    mkdir -p "$work/site/kernelhub-0.1.0.dist-info"
    if [ -f "$site" ]; then
        mkdir "$work/engine"
        if command -v xz >/dev/null; then tar xJf "$site" -C "$work/engine" || return 1; else
            python3 -c "import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2])" "$site" "$work/engine" || return 1
        fi
        site=$work/engine
    fi
    printf 'Metadata-Version: 2.1\nName: kernelhub\nVersion: 0.1.0\n' >"$work/site/kernelhub-0.1.0.dist-info/METADATA"
    printf '[%s]\nkernelhub = %s:register\n' "$group" "$plugin" >"$work/site/kernelhub-0.1.0.dist-info/entry_points.txt"
    for folder in /usr/local/nvidia/lib64 /usr/lib/x86_64-linux-gnu; do
        [ -e "$folder/libcuda.so.1" ] && export LD_LIBRARY_PATH=$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    done
    export PYTHONPATH=${site:+$site:}$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
    [ -z "$site" ] || python3 -m compileall -q -j 0 "$site" kernelhub >/dev/null 2>&1 || true
    python3 - "$variable" "$group" "$@" <<'PYTHON'
import importlib.metadata, importlib.util, sys

import torch

variable, group, *packages = sys.argv[1:]
wrong = [] if torch.cuda.is_available() else ["torch sees no GPU"]
wrong += [f"{name} is not installed" for name in packages if importlib.util.find_spec(name) is None]
found = any(point.name == "kernelhub" for point in importlib.metadata.entry_points(group=group))
wrong += [] if found else [f"{packages[0]} would not find kernelhub's plugin"]
sys.exit("; ".join(wrong) + f": set {variable}" if wrong else 0)
PYTHON
}
