# Sourced by compose-test.sh and kubernetes-test.sh: a run, seen through its control plane. They set SCRATCH, and define
# `ask`, which prints the answer of /v1/status.

say() { printf '%4d s  %s\n' "$SECONDS" "$*"; }

# One figure of the status: a Python expression over s.
status() {
  ask >"$SCRATCH/status.json" 2>>"$SCRATCH/status.log" &&
    python3 -c "import json, sys; s = json.load(open(sys.argv[1])); print($1)" "$SCRATCH/status.json" 2>>"$SCRATCH/status.log"
}

step() { status "int(s['step'])"; }
beyond() { local now; now=$(step) && [ "$now" -gt "$1" ]; }
in_state() { [ "$(status "s['state']")" = "$1" ]; }

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

# From the first step that the control plane names after a disturbance, the run trains more steps than the pipeline held
# samples for, so all services work.
advances() {
  local deadline=$((SECONDS + 400)) from
  until from=$(step); do
    [ "$SECONDS" -lt "$deadline" ] || { say "$1: no status within 400 s"; tail -3 "$SCRATCH/status.log" >&2; return 1; }
    sleep 0.5
  done
  wait_for "$((deadline - SECONDS))" "$1: the run advanced from step $from" beyond "$((from + 8))"
}

# judge BALANCE COUNTS: fails if anything was lost or trained twice.
judge() {
  say "balanced, dead letters: $1"
  say "trained: $2"
  [ "$1" = "True 0" ] || { say "the ledger is not balanced, or there are dead letters"; return 1; }
  [[ $2 == *" 0 missing; "*" 0 trained twice" ]] || { say "something was lost or trained twice"; return 1; }
  say "all of it passed"
}
