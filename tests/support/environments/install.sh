#!/usr/bin/env bash
# The packages of examples/verifiers, examples/openenv and examples/textarena into interpreters of their own, as their
# README.md says, into .environments: `make environments`.
set -euo pipefail
cd "$(dirname "$0")/../../.."
for packages in "verifiers uv" openenv textarena; do
  name=${packages%% *}
  to=.environments/$name
  [ -e "$to/installed" ] && continue
  rm -rf "$to"
  .venv/bin/python -m venv "$to"
  "$to/bin/pip" install --quiet --disable-pip-version-check $packages
  touch "$to/installed"
  echo "$("$to/bin/pip" --disable-pip-version-check freeze | grep "^$name==") is in $to"
done
