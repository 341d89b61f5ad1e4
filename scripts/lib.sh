# shellcheck shell=bash
# What the scripts share: where the checkout is, and a virtual environment that fits it.
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
export ROOT PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

die() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or newer (set PYTHON=/path/to/python)"
}

# Changes when, and only when, an installation made from pyproject.toml is out of date.
install_stamp() { # PYTHON EXTRAS
    "$1" - "$ROOT/pyproject.toml" "$2" <<'PY'
import hashlib, json, pathlib, sys, tomllib
path, extras = sys.argv[1:]
project = tomllib.loads(pathlib.Path(path).read_text())
parts = [project["build-system"], project["project"], project["tool"]["setuptools"]]
text = json.dumps([*parts, path, extras, sys.version], sort_keys=True)
print(hashlib.sha256(text.encode()).hexdigest())
PY
}

# Puts an up-to-date environment first in PATH. VIRTUAL_ENV wins over the directory named here.
use_venv() { # DIRECTORY EXTRAS
    local venv=${VIRTUAL_ENV:-$ROOT/$1} extras=$2 stamp
    if [ ! -x "$venv/bin/python" ]; then
        "$(find_python)" -m venv "$venv" ||
            die "could not make a virtual environment (on Debian: apt-get install python3-venv)"
    fi
    "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$venv is older than Python 3.11: remove it, or set VIRTUAL_ENV to another"
    stamp=$(install_stamp "$venv/bin/python" "$extras")
    if [ "$(cat "$venv/.turnfence-$extras" 2>/dev/null || true)" != "$stamp" ]; then
        printf 'setting up %s (once) ...\n' "${venv#"$ROOT"/}" >&2
        "$venv/bin/python" -m pip install -qq --editable "${ROOT}[${extras}]" ||
            die "pip could not install turnfence[$extras] into $venv"
        printf '%s\n' "$stamp" >"$venv/.turnfence-$extras"
    fi
    export VIRTUAL_ENV=$venv PATH="$venv/bin:$PATH"
    unset PYTHONHOME
}
