#!/bin/sh
# What a container runs: start.sh ENGINE [arguments of builder/build.py] -- [arguments of perf.serve]
# Builds the engine unless it is there already, from an earlier start or mounted; then becomes the server, so that
# signals reach it. Runs the `python` of PATH.
set -eu
cd "$(dirname "$0")/../.."

engine=$1
shift
if [ ! -f "$engine/manifest.json" ]; then
    # A subshell, so that the arguments of perf.serve are still there afterwards.
    (
        # One round for each argument: those before -- go to the end, one after the other; the rest is dropped.
        rounds=$#
        mine=true
        while [ "$rounds" -gt 0 ]; do
            if [ "$1" = -- ]; then mine=false; fi
            if $mine; then set -- "$@" "$1"; fi
            shift
            rounds=$((rounds - 1))
        done
        exec python builder/build.py --output "$engine" "$@"
    )
fi
while [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done
if [ $# -gt 0 ]; then shift; fi
exec python -m perf.serve --engine "$engine" "$@"
