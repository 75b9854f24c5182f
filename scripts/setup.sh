#!/usr/bin/env bash
# Install everything: into the active virtual environment, or into .venv, which is made if needed.
#   scripts/setup.sh            (source it to have the environment active afterwards)
# PYTHON=python3.10 chooses the interpreter of a new .venv.

setup() {
    local root here
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || return
    if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
        if [ ! -x "$root/.venv/bin/python" ]; then
            echo "setup: making $root/.venv"
            "${PYTHON:-python3}" -m venv "$root/.venv" || return
        fi
        source "$root/.venv/bin/activate" || return
    fi
    here=$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])') || return
    if (cd "$root" && python - 2>/dev/null) <<'PY'
import setuptools  # before distutils, which is a part of it
from distutils.core import run_setup
from importlib.metadata import entry_points, version
from packaging.requirements import Requirement
asked = run_setup("setup.py", stop_after="init")
assert version("fairseq_inf") == asked.get_version()
found = {f"{e.name} = {e.value}" for e in entry_points(group="console_scripts")}
assert found >= set(asked.entry_points["console_scripts"])
for line in asked.install_requires + asked.extras_require["test"]:
    wanted = Requirement(line)
    if wanted.marker is None or wanted.marker.evaluate():
        assert version(wanted.name) in wanted.specifier
PY
    then
        echo "setup: everything is installed"
        return
    fi
    local quiet=(--quiet --disable-pip-version-check)
    case "$here" in
        3.10)
            # fairseq 0.12.2's requirements name omegaconf 2.0, which newer pips refuse to read;
            # its sources lack a file of an extension that is only built when torch is in sight
            echo "setup: installing torch and fairseq 0.12.2 (about 2 minutes)"
            python -m pip install "${quiet[@]}" "pip<24.1" || return
            python -m pip install "${quiet[@]}" "torch==2.1.2" "numpy<1.24" "transformers<4.50" || return
            python -m pip install "${quiet[@]}" "fairseq==0.12.2" || return
            ;;
        3.8 | 3.9) echo "setup: Python $here is too old, use 3.10 or newer" >&2; return 1 ;;
        *)
            # without build isolation, or pip fetches a second torch to compile fairseq against
            echo "setup: installing torch 2.13.0 and compiling fairseq (3 to 5 minutes the first time)"
            python -m pip install "${quiet[@]}" "torch==2.13.0" numpy cython setuptools wheel || return
            python -m pip install "${quiet[@]}" --no-build-isolation "fairseq-fixed==0.12.3.1" || return
            ;;
    esac
    echo "setup: installing fairseq_inf"
    python -m pip install "${quiet[@]}" setuptools wheel || return
    python -m pip install "${quiet[@]}" --no-build-isolation --editable "$root[test]" || return
    echo "setup: done"
}

setup
status=$?
unset -f setup
if [ "${BASH_SOURCE[0]}" != "$0" ]; then
    return $status
fi
exit $status
