#!/usr/bin/env bash
# A real SGLang server on a CPU, with the packages of install.sh and the PyTorch of .venv; its arguments are SGLang's.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
# After .venv's own packages, which are others' as well: these only add what is missing there.
export PYTHONPATH=$here/stand_ins SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES= PYTHONWARNINGS=ignore
exec "$root/.venv/bin/python" -c "
import runpy, sys
sys.path.append('$root/.sglang')
runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)" "$@"
