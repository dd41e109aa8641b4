#!/usr/bin/env bash
# The packages of examples/verifiers, examples/openenv and examples/textarena, as their README.md says, and the harness
# lm-eval, and torchao, which prints as it is imported, into interpreters of their own in .environments:
# `make environments`.
set -euo pipefail
cd "$(dirname "$0")/../../.."

fill() {
  local to=.environments/$1
  [ -e "$to/installed" ] && return
  rm -rf "$to"
  .venv/bin/python -m venv "$to"
  "$to/bin/pip" install --quiet --disable-pip-version-check "$@"
  touch "$to/installed"
  echo "$("$to/bin/pip" --disable-pip-version-check freeze | grep "^${1//-/[-_]}==") is in $to"
}

filling=() status=0
for packages in "verifiers uv" openenv textarena torchao "lm-eval lm-eval[api]"; do
  fill $packages &
  filling+=($!)
done
for one in "${filling[@]}"; do wait "$one" || status=$?; done
exit "$status"
