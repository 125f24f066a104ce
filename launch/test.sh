#!/usr/bin/env bash
# Make the environment and run the tests, two files at a time: many of them wait for processes more than they compute.
# Further arguments go to pytest: bash launch/test.sh -k plan. The slowest are left out: bash launch/test.sh -m slow
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
"$python" -m pytest tests --quiet --durations=10 --numprocesses 2 --dist loadfile -m "not slow" "$@"
