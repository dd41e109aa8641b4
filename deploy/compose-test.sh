#!/usr/bin/env bash
# Builds docker-compose.yml and runs it for real: scales it, kills and restarts every service and the broker, and then
# counts what was lost or trained twice. Says what it saw and when; exits with 1 at the first thing that is not so.
#
#   deploy/compose-test.sh            all of it; removes its containers and volumes at the end, not the images
#   COMPOSE="docker compose" deploy/compose-test.sh
#
# It needs a Docker engine, docker-compose and what `docker-compose build` needs (see docker-compose.yml for mirrors).
set -euo pipefail
cd "$(dirname "$0")/.."

read -ra COMPOSE <<<"${COMPOSE:-docker-compose}"
RUN=arithmetic
SCRATCH=$(mktemp -d)
export COMPOSE_PROJECT_NAME=tidemill-test-$$ SETTINGS=$SCRATCH/settings.env
cat >"$SETTINGS" <<'SETTINGS'
TIDEMILL_WARM_START__STOP_ACCURACY=0.1
TIDEMILL_TRAINER__STEPS=100000
TIDEMILL_TRAINER__BATCH_GROUPS=32
TIDEMILL_TRAINER__CHECKPOINT__EVERY=10
TIDEMILL_TRAINER__OPTIMIZER__LR=1.0e-5
SETTINGS

compose() { "${COMPOSE[@]}" "$@"; }
say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

end() {
  local code=$?
  [ "$code" = 0 ] || { say "FAILED, last lines of every service:"; compose logs --no-color --tail=15 >&2 || true; }
  compose down --volumes --timeout 20 >"$SCRATCH/down.log" 2>&1 || { cat "$SCRATCH/down.log" >&2; code=1; }
  say "down: no container and no volume of it is left"
  rm -rf "$SCRATCH"
  exit "$code"
}
trap end EXIT

# One figure of `tidemill status --json`: a Python expression over s.
status() {
  compose exec -T feeder tidemill status "$RUN" --json 2>>"$SCRATCH/status.log" |
    compose exec -T feeder python -c "import json, sys; s = json.loads(sys.stdin.readline()); print($1)" 2>>"$SCRATCH/status.log"
}

# wait_for SECONDS WHAT COMMAND...: until the command succeeds.
wait_for() {
  local deadline=$((SECONDS + $1)) what=$2 began=$SECONDS
  shift 2
  until "$@"; do
    [ "$SECONDS" -lt "$deadline" ] || { say "no $what within $((SECONDS - began)) s"; tail -3 "$SCRATCH/status.log" >&2; return 1; }
    sleep 0.5
  done
  say "$what, after $((SECONDS - began)) s"
}

step() { status "s['step']"; }
beyond() { local now; now=$(step) && [ "$now" -gt "$1" ]; }
alive() { [ "$(status "sum(x['service'].startswith('$1') and x['state'] != 'starting' for x in s['services'])")" = "$2" ]; }

# The run goes on from where it is now.
goes_on() {
  local from
  from=$(step)
  wait_for 180 "$1: the run went on from step $from" beyond "$((from + 2))"
}

say "building"
compose build --quiet >"$SCRATCH/build.log" 2>&1 || { tail -20 "$SCRATCH/build.log" >&2; exit 1; }
say "built"
docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep -E '^tidemill-(feeder|reward|control|trainer|generator):latest ' | sort

compose up -d >"$SCRATCH/up.log" 2>&1 || { tail -20 "$SCRATCH/up.log" >&2; exit 1; }
say "up: the model is made, all services are started"
wait_for 300 "the first steps are trained" beyond 2

compose up -d --scale generator=3 --scale reward=2 >"$SCRATCH/up.log" 2>&1
wait_for 240 "scaled to 3 generators and 2 reward services" alive generator 3
goes_on "with 3 generators"
compose up -d --scale generator=1 --scale reward=1 >"$SCRATCH/up.log" 2>&1
wait_for 120 "scaled back to 1 generator" alive generator 1
goes_on "with 1 generator"

for service in feeder reward generator trainer; do
  compose kill -s SIGKILL "$service" >"$SCRATCH/up.log" 2>&1
  say "killed $service"
  compose up -d >"$SCRATCH/up.log" 2>&1
  goes_on "$service started again"
done
for service in feeder reward generator trainer redis; do
  compose restart "$service" >"$SCRATCH/up.log" 2>&1
  goes_on "$service restarted"
done

# Killed from within, Docker's restart policy brings it back.
compose exec -T generator sh -c 'kill -9 $(cat /proc/1/task/1/children)' >"$SCRATCH/up.log" 2>&1 || true
say "killed the generator's process"
goes_on "the generator came back by itself"

compose stop --timeout 60 trainer >"$SCRATCH/up.log" 2>&1
say "trainer stopped, with a checkpoint"
balance=$(status "s['balanced'], s['dead_letters']")
counts=$(compose exec -T feeder python - "$RUN" <<'PYTHON'
import sys
from collections import Counter
from pathlib import Path

from deploy.summary import lineage, read_lines

lines = lineage(read_lines(Path("runs") / sys.argv[1] / "trained.jsonl"))
uses = Counter(tuple(sample) for line in lines for sample in line["samples"])
steps = [line["step"] for line in lines]
missing = len(set(range(max(steps) + 1)) - set(steps))
print(f"{len(steps)} steps, {missing} missing; {len(uses)} samples, {sum(uses.values()) - len(uses)} trained twice")
PYTHON
)
say "balanced, dead letters: $balance"
say "trained: $counts"
[ "$balance" = "(True, 0)" ] || { say "the ledger is not balanced, or there are dead letters"; exit 1; }
[[ $counts == *" 0 missing; "*" 0 trained twice" ]] || { say "something was lost or trained twice"; exit 1; }
say "all of it passed"
