#!/usr/bin/env bash
# Set up, check style and types, run all tests.  Arguments go to pytest.
# FAIRSEQ_INF_DATA=DIR lets the tests that read real data find it; without it they are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
ruff check .
ruff format --check .
mypy
[ -n "${FAIRSEQ_INF_DATA:-}" ] || echo "FAIRSEQ_INF_DATA is not set: tests on real data are skipped"
python -m pytest -n 2 --dist loadfile "$@"
