#!/usr/bin/env bash
# SGLang's own wheel and the plain Python packages that its server imports, into .sglang beside .venv: `make sglang`.
# What it declares besides (CUDA, kernels, its own PyTorch) is left out: serve.sh runs it with .venv's PyTorch on a CPU.
set -euo pipefail
cd "$(dirname "$0")/../../.."
to=.sglang
version=0.5.23
[ -e "$to/sglang-$version.dist-info" ] && exit 0
rm -rf "$to" "$to.part"
pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$to.part" "$@"; }
pip "sglang==$version" torchvision==0.28.0 orjson IPython traitlets gguf soundfile scipy \
  asttokens executing jedi parso matplotlib-inline pexpect ptyprocess prompt_toolkit wcwidth pure_eval stack_data \
  ipython-pygments-lexers cffi pycparser
mv "$to.part" "$to"
echo "SGLang $version for the CPU is in $to"
