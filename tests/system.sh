#!/usr/bin/env bash
# Installs the programs that tests drive and pip does not bring, where they are missing: `make system`.
# From Debian's or Ubuntu's packages, as root. Servers among them are not started: each test starts its own.
set -euo pipefail

# package: a program of it, or several of which one is enough
wanted="
bubblewrap: bwrap
chromium: chromium chromium-browser google-chrome google-chrome-stable
docker-compose: docker-compose
kubernetes-client: kubectl
openssl: openssl
prometheus: promtool
redis-server: redis-server
slurm-wlm: slurmctld
"

export PATH=$PATH:/usr/sbin:/sbin
packages=()
while read -r package programs; do
  [ -n "$package" ] || continue
  found=
  for program in $programs; do command -v "$program" >/dev/null && found=yes; done
  [ -n "$found" ] || packages+=("${package%:}")
done <<<"$wanted"
[ ${#packages[@]} -gt 0 ] || exit 0

fail() { echo "$1: as root, make system; or install them by hand" >&2; exit 1; }
command -v apt-get >/dev/null || fail "no apt-get here to install ${packages[*]} with"
[ "$(id -u)" = 0 ] || fail "not root, cannot install ${packages[*]}"

# Debian's way to say that no service may be started by its package.
policy=/usr/sbin/policy-rc.d
if ! [ -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || fail "cannot read the lists of packages for ${packages[*]}"
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null || fail "cannot install ${packages[*]}"
echo "installed: ${packages[*]}"
