#!/usr/bin/env bash
# Builds docker-compose.yml and runs it for real: scales it, kills and restarts every service and the broker, and then
# counts what was lost or trained twice. Says what it saw and when; exits with 1 at the first thing that is not so.
#
#   deploy/compose-test.sh            all of it; removes its containers and volumes at the end, not the images
#   COMPOSE="docker compose" deploy/compose-test.sh
#
# It needs a Docker engine, docker-compose, curl, python3 and what `docker-compose build` needs (see docker-compose.yml for mirrors).
set -euo pipefail
cd "$(dirname "$0")/.."

read -ra COMPOSE <<<"${COMPOSE:-docker-compose}"
RUN=arithmetic
SCRATCH=$(mktemp -d)
export COMPOSE_PROJECT_NAME=tidemill-test-$$ SETTINGS=$SCRATCH/settings.env CONTROL_PORT=${CONTROL_PORT:-18642}
cat >"$SETTINGS" <<'SETTINGS'
TIDEMILL_WARM_START__STOP_ACCURACY=0.1
TIDEMILL_TRAINER__STEPS=100000
TIDEMILL_TRAINER__BATCH_GROUPS=128
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

# rest METHOD PATH [CURL OPTIONS...]: ask the control plane from this machine.
rest() {
  local method=$1 path=$2
  shift 2
  curl --silent --show-error --fail-with-body --max-time 60 -X "$method" -H "Authorization: Bearer $TOKEN" \
    "$@" "http://127.0.0.1:$CONTROL_PORT$path" 2>>"$SCRATCH/status.log"
}

# One figure of the status: a Python expression over s.
status() { rest GET /v1/status | python3 -c "import json, sys; s = json.load(sys.stdin); print($1)" 2>>"$SCRATCH/status.log"; }

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
in_state() { [ "$(status "s['state']")" = "$1" ]; }
beyond() { local now; now=$(step) && [ "$now" -gt "$1" ]; }
alive() { [ "$(status "sum(x['role'] == '$1' and x['live'] and x['state'] not in ('starting', 'loading') for x in s['services'])")" = "$2" ]; }

# The run trains more steps than the pipeline held samples for, so all services work.
advances() {
  local from
  from=$(step) || from=$last
  wait_for 300 "$1: the run advanced from step $from" beyond "$((from + 8))"
  last=$(step)
}

say "building"
compose build --quiet >"$SCRATCH/build.log" 2>&1 || { tail -20 "$SCRATCH/build.log" >&2; exit 1; }
say "built"
docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep -E '^tidemill-(control|feeder|reward|trainer|generator):latest ' | sort

compose up -d >"$SCRATCH/up.log" 2>&1 || { tail -20 "$SCRATCH/up.log" >&2; exit 1; }
say "up: the model is made, all services are started"
TOKEN=$(compose exec -T control cat control/token)
last=0
[ "$(curl --silent --output /dev/null --write-out '%{http_code}' "http://127.0.0.1:$CONTROL_PORT/v1/status")" = 401 ]
say "who has no token is refused"
wait_for 300 "the first steps are trained, says REST" beyond 2

compose up -d --scale generator=3 --scale reward=2 >"$SCRATCH/up.log" 2>&1
wait_for 600 "scaled to 3 generators" alive generator 3
wait_for 60 "and 2 reward services" alive reward 2
advances "with 3 generators"
compose up -d --scale generator=1 --scale reward=1 >"$SCRATCH/up.log" 2>&1
wait_for 120 "scaled back to 1 generator" alive generator 1
advances "with 1 generator"

rest POST /v1/pause >"$SCRATCH/answer.json"
wait_for 120 "paused by REST" in_state paused
before=$(step)
sleep 5
[ "$(step)" = "$before" ]
say "5 s later the step is $before still"
rest POST /v1/resume >"$SCRATCH/answer.json"
advances "resumed by REST"

for service in feeder reward control generator trainer; do
  compose kill -s SIGKILL "$service" >"$SCRATCH/up.log" 2>&1
  say "killed $service"
  compose up -d --no-deps "$service" >"$SCRATCH/up.log" 2>&1
  advances "$service started again"
done
for service in feeder reward control generator trainer redis; do
  compose restart "$service" >"$SCRATCH/up.log" 2>&1
  say "restarted $service"
  advances "$service"
done

# Killed from within, Docker's restart policy brings it back.
compose exec -T generator sh -c 'kill -9 $(cat /proc/1/task/1/children)' >"$SCRATCH/up.log" 2>&1 || true
say "killed the generator's process"
advances "the generator came back by itself"

compose stop --timeout 60 trainer >"$SCRATCH/up.log" 2>&1
say "trainer stopped, with a checkpoint"
balance=$(status "s['ledger']['balanced'], s['dead_letters']")
counts=$(compose exec -T feeder python - "$RUN" <<'PYTHON'
import sys
from collections import Counter
from pathlib import Path

from schemas.run_folder import read_lines, surviving_lines

lines = surviving_lines(read_lines(Path("runs") / sys.argv[1] / "trained.jsonl"))
uses = Counter(tuple(sample) for line in lines for sample in line["samples"])
steps = [line["step"] for line in lines]
missing = len(set(range(max(steps) + 1)) - set(steps))
print(f"{len(steps)} steps, {missing} missing; {len(uses)} samples, {sum(uses.values()) - len(uses)} trained twice")
PYTHON
)
say "balanced, dead letters: $balance"
say "trained: $counts"
[ "$balance" = "True 0" ] || { say "the ledger is not balanced, or there are dead letters"; exit 1; }
[[ $counts == *" 0 missing; "*" 0 trained twice" ]] || { say "something was lost or trained twice"; exit 1; }
say "all of it passed"
