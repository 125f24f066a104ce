# shellcheck shell=bash
# Makes the Python environment and goes to the repository's root. Sourced by the other scripts, not run by itself.
# Sets $python. DFLASH_VENV names another place for the environment than .venv; DFLASH_PYTHON an interpreter that has all
# of requirements.txt, and nothing is made then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
trap 'echo "failed: $0, line $LINENO: $BASH_COMMAND" >&2' ERR

venv="${DFLASH_VENV:-$PWD/.venv}"
python="${DFLASH_PYTHON:-$venv/bin/python}"
if [ -z "${DFLASH_PYTHON:-}" ] && ! cmp -s requirements.txt "$venv/requirements.installed"; then
    base=""
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            base="$candidate"
            break
        fi
    done
    if [ -z "$base" ]; then
        echo "Python 3.11 or newer is needed, with venv and pip" >&2
        exit 1
    fi
    echo "installing requirements.txt into $venv (a few minutes, once)"
    "$base" -m venv "$venv"
    "$python" -m pip install --quiet --disable-pip-version-check -r requirements.txt
    cp requirements.txt "$venv/requirements.installed"
fi
# one thread per rank: several collapse where cores are shared
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
