#!/usr/bin/env bash
# Make the environment and run the tests. Further arguments go to pytest: bash launch/test.sh -k plan
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
"$python" -m pytest tests --quiet --durations=10 "$@"
