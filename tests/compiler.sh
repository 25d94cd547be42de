#!/usr/bin/env bash
# The C++ compiler, which remembers what it made of csrc/cpu and csrc/cuda: a test run compiles it once for each set of
# flags, not again in every process that has a cache of its own. tests/conftest.py puts it on PATH as g++.
real=@real@
memory=@memory@
case "$*" in
*-shared*csrc/cpu/*.cpp* | *-shared*csrc/cuda/*.cu*) ;;
*) exec "$real" "$@" ;;
esac
words=()
files=()
parts=() # objects, which are in another folder in each process
while [ $# -gt 0 ]; do
    case $1 in
    -o)
        made=$2
        shift
        ;;
    *.o)
        parts+=("$1")
        files+=("$1")
        ;;
    *)
        words+=("$1")
        case $1 in
        -I*) files+=("${1#-I}"/*.h) ;;
        *.cpp | *.cu) files+=("$1") ;;
        esac
        ;;
    esac
    shift
done
key=$({ printf '%s\0' "${words[@]}" && cat "${files[@]}"; } | sha256sum) && key=$memory/${key%% *}
if [ -f "$key" ]; then
    exec cp "$key" "$made"
fi
"$real" "${words[@]}" "${parts[@]}" -o "$made" || exit $?
cp "$made" "$key.$$" 2>/dev/null && mv "$key.$$" "$key" # where there is no room, it is compiled again
exit 0
