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
. deploy/drills.sh

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

ask() { rest GET /v1/status; }
alive() { [ "$(status "sum(x['role'] == '$1' and x['live'] and x['state'] not in ('starting', 'loading') for x in s['services'])")" = "$2" ]; }

say "building"
compose build --quiet >"$SCRATCH/build.log" 2>&1 || { tail -20 "$SCRATCH/build.log" >&2; exit 1; }
say "built"
docker image ls --format '{{.Repository}}:{{.Tag}} {{.Size}}' | grep -E '^tidemill-(control|feeder|reward|trainer|generator):latest ' | sort

compose up -d >"$SCRATCH/up.log" 2>&1 || { tail -20 "$SCRATCH/up.log" >&2; exit 1; }
say "up: the model is made, all services are started"
TOKEN=$(compose exec -T control cat control/token)
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

from schemas.run_folder import TRAINED, StoredLines, surviving_lines

lines = list(surviving_lines(StoredLines(Path("runs") / sys.argv[1] / TRAINED)))
uses = Counter(tuple(sample) for line in lines for sample in line["samples"])
steps = [line["step"] for line in lines]
missing = len(set(range(max(steps) + 1)) - set(steps))
print(f"{len(steps)} steps, {missing} missing; {len(uses)} samples, {sum(uses.values()) - len(uses)} trained twice")
PYTHON
)
judge "$balance" "$counts"
