#!/usr/bin/env bash
# Create the virtual environment and install the pinned packages; do nothing when that is done.
#
#   VENV    where (default .venv)
#   PYTHON  which Python creates it (default: the first of python3, python3.12, python3.11 that fits)
#   STACK   cpu or cluster (default: cluster where nvidia-smi finds a GPU)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-}
STACK=${STACK:-}
LOG=$VENV/setup.log

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

version_of() { # prints major.minor, or nothing if it does not run
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

fits() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

choose_python() {
    if [ -n "$PYTHON" ]; then
        local found
        found=$(version_of "$PYTHON")
        [ -n "$found" ] || fail "PYTHON=$PYTHON does not run; give the path of Python 3.11 or newer"
        fits "$PYTHON" || fail "PYTHON=$PYTHON is Python $found; allowed: 3.11 or newer"
        return
    fi
    for PYTHON in python3 python3.12 python3.11; do
        if fits "$PYTHON"; then return; fi
    done
    fail "no Python 3.11 or newer found (python3 is $(version_of python3)); install one and say" \
        "which: make setup PYTHON=/path/to/python3.12"
}

# One line a phase: what is done, then how long it took. Output goes to the log and is shown only
# on failure.
phase() {
    local what=$1 start=$SECONDS
    shift
    printf '  %s ... ' "$what"
    if ! "$@" >>"$LOG" 2>&1; then
        printf 'failed; the end of %s:\n' "$LOG"
        tail -n 15 "$LOG"
        fail "$what failed. Fix what the lines above say and run it again: it goes on from there"
    fi
    printf '%d s\n' $((SECONDS - start))
}

pip_install() {
    "$VENV/bin/python" -m pip --disable-pip-version-check install --progress-bar off "$@"
}

install_cpu() {
    phase "packages (torch, Megatron-Core, what SGLang needs: 2 to 6 GB)" pip_install \
        -r requirements/cpu.txt -r requirements/dev.txt -c requirements/constraints.txt
    phase "SGLang" pip_install --no-deps -r requirements/cpu-nodeps.txt
    phase "placeholders for a machine without a GPU" pip_install \
        --no-deps --no-build-isolation --force-reinstall ./requirements/cpu_placeholders
}

install_cluster() {
    # The placeholder of sgl_kernel must never hide the real one.
    phase "no CPU placeholders" \
        "$VENV/bin/python" -m pip uninstall --yes megatron-opo-cpu-placeholders
    phase "torch" pip_install "$(grep '^torch==' requirements.txt)" \
        setuptools==84.2.1 wheel ninja pybind11
    phase "packages (Megatron-Core, SGLang, Transformer Engine is compiled: this takes long)" \
        pip_install --no-build-isolation -r requirements.txt -r requirements/dev.txt
}

if [ -z "$STACK" ]; then
    if nvidia-smi -L >/dev/null 2>&1; then STACK=cluster; else STACK=cpu; fi
fi
case $STACK in
    cpu | cluster) ;;
    *) fail "STACK=$STACK; allowed: cpu, cluster" ;;
esac

if [ -x "$VENV/bin/python" ] && fits "$VENV/bin/python"; then
    existing=$(version_of "$VENV/bin/python")
    if [ -n "$PYTHON" ] && [ "$(version_of "$PYTHON")" != "$existing" ]; then
        fail "$VENV was made with Python $existing, and PYTHON=$PYTHON is another: delete $VENV," \
            "or keep both: VENV=.venv-other"
    fi
else
    [ ! -e "$VENV" ] || fail "$VENV exists but holds no Python 3.11 or newer: delete it"
    choose_python
fi

fingerprint() {
    echo "$STACK $("$VENV/bin/python" -VV 2>&1) $PWD"
    find requirements requirements.txt pyproject.toml tools/setup.sh -type f \
        -not -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
}

STAMP=$VENV/installed
if [ -x "$VENV/bin/python" ] && [ "$(fingerprint)" = "$(cat "$STAMP" 2>/dev/null)" ]; then
    exit 0
fi

echo "Setting up $VENV (the $STACK stack); later calls skip this"
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV" ||
    fail "$PYTHON cannot create a virtual environment; Debian and Ubuntu: apt install python3-venv"
: >"$LOG"
"install_$STACK"
phase "megatron-opo itself" pip_install --no-deps --no-build-isolation --editable .
fingerprint >"$STAMP"
