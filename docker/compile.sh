#!/bin/sh
# compile.sh TARGET…: JOBS compilers at once.
export NINJA_STATUS='[%f/%t %e] '
exec ninja -C /build/build -j "${JOBS:-1}" "$@"
