#!/bin/sh
# logged.sh LOG COMMAND…: run a command, keep what it says, and end as it does.
log=$1
shift
mkdir -p "$(dirname "$log")" "$HOME"
"$@" >"$log" 2>&1
code=$?
cat "$log"
exit "$code"
