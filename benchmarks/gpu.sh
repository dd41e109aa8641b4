#!/bin/sh
# Measures this machine's GPUs: benchmarks/gpu.sh OUT --data GSM8K_FOLDER; --help tells more.
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHONPATH="$root" exec "${PYTHON:-$root/.venv/bin/python}" -m benchmarks.gpu "$@"
