# Sourced by the other scripts: goes to the project's folder and makes sure that .venv holds what pyproject.toml asks for.
# PYTHON picks the interpreter for a new .venv (3.11 or later). Everything it says goes to standard error.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What this version of the scripts installs; the stamp holds its checksum.
_wanted() { cat pyproject.toml setup.py scripts/setup.sh scripts/constraints.txt | sha256sum | cut -d' ' -f1; }

_find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: Python 3.11 or later is needed; set PYTHON to its path" >&2
    return 1
}

_setup() {
    if [ ! -x .venv/bin/python ]; then
        echo "setup: creating .venv" >&2
        "$(_find_python)" -m venv .venv
    fi
    echo "setup: installing; this takes minutes the first time" >&2
    local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input -c scripts/constraints.txt)
    # torch on its own and first: where an index has CPU builds, they satisfy what follows.
    "${pip[@]}" torch
    "${pip[@]}" -e '.[dev]'
    _wanted > .venv/rayllm-setup
}

if [ "$(cat .venv/rayllm-setup 2>/dev/null)" != "$(_wanted)" ]; then
    _setup >&2 < /dev/null
fi
