#!/usr/bin/env bash
# Applies what `tidemill kubernetes` writes to a real cluster, trains a small model there, disturbs every part, and then
# counts what was lost or trained twice. Says what it saw and when; exits with 1 at the first thing that is not so.
#
#   deploy/kubernetes-test.sh            all drills, in a namespace of its own that it deletes at the end
#   deploy/kubernetes-test.sh scale kill these drills: again scale delete force kill roll wrong drain taint lose
#
# It needs kubectl 1.27 or newer on the PATH, for a cluster whose nodes have a default StorageClass with ReadWriteMany;
# curl, and Tidemill's own environment. Drain, taint and lose need two nodes. Variables:
#   TIDEMILL    the command that writes the objects         (.venv/bin/tidemill)
#   REGISTRY    of the images, with TAG: REGISTRY/tidemill-ROLE:TAG
#   LOAD        builds the images with $DOCKER and runs `$LOAD IMAGE...`, such as "kind load docker-image"; without it
#               the nodes must be able to pull them
#   LOSE, FIND  `$LOSE NODE` cuts a node off and `$FIND NODE` joins it again, such as "docker pause" and "docker unpause"
#               with kind; without them no node is lost
#   NAMES       address of the cluster's name server, if that is no pod kube-dns of kube-system
#   KEEP=1      leaves the namespace
set -euo pipefail
cd "$(dirname "$0")/.."

read -ra TIDEMILL <<<"${TIDEMILL:-.venv/bin/tidemill}"
read -ra DOCKER <<<"${DOCKER:-docker}"
read -ra LOAD <<<"${LOAD:-}"
read -ra LOSE <<<"${LOSE:-}"
read -ra FIND <<<"${FIND:-}"
REGISTRY=${REGISTRY:-tidemill.test} TAG=${TAG:-0.1.0} PORT=${PORT:-18643}
SPACE=tidemill-drill
ROLES="feeder reward generator control trainer"
SCRATCH=$(mktemp -d)
TIMES=$SCRATCH/times
DRILLS=${*:-scale delete force kill roll wrong drain taint lose}

. deploy/drills.sh
k() { kubectl -n "$SPACE" "$@"; }
quietly() { "$@" >"$SCRATCH/output.log" 2>&1 || { tail -20 "$SCRATCH/output.log" >&2; say "failed: $*"; return 1; }; }

end() {
  local code=$?
  trap - EXIT
  [ "$code" = 0 ] || {
    say "FAILED; pods, and last lines of every service:"
    k get pods -o wide >&2 || true
    for role in $ROLES; do k logs "-lrole=$role" --all-containers --tail=15 --prefix >&2 || true; done
  }
  [ ! -f "$SCRATCH/forward.pid" ] || kill -- -"$(cat "$SCRATCH/forward.pid")" 2>/dev/null || true
  [ -n "${KEEP:-}" ] || { kubectl delete namespace "$SPACE" --timeout=180s >/dev/null && say "the namespace is deleted"; } || code=1
  rm -rf "$SCRATCH"
  exit "$code"
}
trap end EXIT

# --- the run, seen through its control plane -------------------------------------------------------------------------

# The way to the control plane, made again whenever its pod goes or does not answer.
forward() {
  export SPACE PORT SCRATCH
  setsid bash -c 'while :; do
    kubectl -n "$SPACE" port-forward service/control "$PORT:8642" & echo $! >"$SCRATCH/kubectl.pid"; wait; sleep 0.3
  done' >"$SCRATCH/forward.log" 2>&1 </dev/null &
  echo $! >"$SCRATCH/forward.pid"
}

reconnect() { kill "$(cat "$SCRATCH/kubectl.pid")" 2>/dev/null || true; }

ask() {
  curl --silent --show-error --fail --max-time 5 -H "Authorization: Bearer $TOKEN" "http://127.0.0.1:$PORT/v1/status" ||
    { [[ $? = 7 || $? = 22 ]] || reconnect; return 1; }
}

ready() { [ "$(k get "deployment/$1" -o 'jsonpath={.status.readyReplicas}/{.status.replicas}/{.status.updatedReplicas}')" = "$2/$2/$2" ]; }
node_of() { k get pods "-lrole=$1" --field-selector=status.phase=Running -o 'jsonpath={.items[0].spec.nodeName}'; }
is_ready() { [ "$(kubectl get node "$1" -o 'jsonpath={.status.conditions[?(@.type=="Ready")].status}')" = "$2" ]; }
running() { [ -n "$(node_of "$1" 2>/dev/null)" ]; }

# Notes a time since `began`.
note() { printf '%-44s %4d s\n' "$1" "$((SECONDS - began))" >>"$TIMES"; }

# Until the run continues after a disturbance.
recovers() {
  advances "$1"
  note "$1"
}

# steps per minute over half a minute
throughput() {
  local from until
  from=$(step)
  sleep 30
  until=$(step)
  say "$1: $(((until - from) * 2)) steps a minute"
  printf '%-44s %4d steps/min\n' "$1" "$(((until - from) * 2))" >>"$TIMES"
}

# --- the drills ------------------------------------------------------------------------------------------------------

scaled() {
  began=$SECONDS
  quietly k exec deploy/control -- tidemill scale /etc/tidemill/config.yaml "generator=$1"
  wait_for 400 "scaled to $1 generators through the control plane" ready generator "$1"
  note "scaled to $1, ready"
  recovers "scaled to $1"
}

drill_scale() {
  throughput "1 generator"
  scaled 8
  throughput "8 generators"
  drill_again
  scaled 1
  throughput "1 generator again"
}

identities() { k get pods -o 'jsonpath={range .items[*]}{.metadata.name} {.metadata.uid} {.status.containerStatuses[*].restartCount}{"\n"}{end}' | sort; }

drill_again() {
  identities >"$SCRATCH/before"
  began=$SECONDS
  quietly "$SCRATCH/objects/apply.sh"
  identities >"$SCRATCH/after"
  diff "$SCRATCH/before" "$SCRATCH/after" >&2 || { say "apply.sh again changed pods"; return 1; }
  say "apply.sh again changed no pod"
  recovers "apply again"
}

drill_delete() {
  for role in feeder reward generator control redis trainer; do
    began=$SECONDS
    quietly k delete pod "-lrole=$role" --timeout=330s
    recovers "deleted $role"
  done
}

drill_force() {
  for role in feeder reward generator control redis trainer; do
    began=$SECONDS
    quietly k delete pod "-lrole=$role" --grace-period=0 --force
    recovers "deleted $role, no grace"
  done
}

drill_kill() {
  for role in $ROLES; do
    wait_for 60 "$role runs" running "$role"
    began=$SECONDS
    # Of tini, which is process 1: the exec itself may end with it.
    k exec "$(k get pods "-lrole=$role" --field-selector=status.phase=Running -o name | head -1)" -- \
      sh -c 'kill -9 $(cat /proc/1/task/1/children)' >"$SCRATCH/output.log" 2>&1 || true
    recovers "SIGKILL in $role"
  done
}

drill_roll() {
  for role in generator reward feeder control; do
    began=$SECONDS
    quietly k rollout restart "deployment/$role"
    quietly k rollout status "deployment/$role" --timeout=300s
    recovers "rolled $role"
  done
}

# Exit code of the trainer's newest pod, which may have ended before its ranks started.
trainer_code() {
  k get pods -lrole=trainer --sort-by=.metadata.creationTimestamp \
    -o 'jsonpath={.items[-1:].status.initContainerStatuses[*].state.terminated.exitCode}{" "}{.items[-1:].status.containerStatuses[*].state.terminated.exitCode}'
}
ended_wrong() { grep -qw 2 <<<"$(trainer_code)"; }
job_failed() { [ "$(k get job trainer -o 'jsonpath={.status.conditions[?(@.type=="Failed")].status}')" = True ]; }

drill_wrong() {
  cp "$SCRATCH/objects/config.yaml" "$SCRATCH/config.yaml"
  sed -i 's/^  batch_groups: .*/  batch_groups: 0/' "$SCRATCH/objects/config.yaml"
  began=$SECONDS
  quietly "$SCRATCH/objects/apply.sh"
  wait_for 120 "a wrong configuration: the trainer ends with 2" ended_wrong
  if [ -n "$(k get job trainer -o 'jsonpath={.spec.podFailurePolicy}')" ]; then
    wait_for 60 "and its Job fails" job_failed
    [ "$(k get pods -lrole=trainer -o name | wc -l)" = 1 ] || { say "more than one pod tried a wrong configuration"; return 1; }
    say "after one pod"
  else
    say "this cluster's Jobs know no podFailurePolicy (Kubernetes 1.26): it is not seen that the Job fails after one pod"
  fi
  note "wrong configuration: ended with 2"
  cp "$SCRATCH/config.yaml" "$SCRATCH/objects/config.yaml"
  began=$SECONDS
  quietly "$SCRATCH/objects/apply.sh"
  recovers "right configuration again"
}

nodes() { kubectl get nodes -o name | wc -l; }

drill_drain() {
  [ "$(nodes)" -ge 2 ] || { say "one node only: none is drained"; return; }
  local node
  node=$(node_of trainer)
  began=$SECONDS
  quietly kubectl drain "$node" --ignore-daemonsets --delete-emptydir-data --pod-selector=app=tidemill --timeout=400s
  say "drained $node"
  note "drained the trainer's node"
  recovers "drained"
  quietly kubectl uncordon "$node"
}

# Puts the pods of these roles on a node without Redis, whose volume could be of its node.
move_from_redis() {
  local node role
  node=$(node_of redis)
  quietly kubectl cordon "$node"
  for role in "$@"; do
    [ "$(node_of "$role")" != "$node" ] || quietly k delete pod "-lrole=$role" --timeout=330s
  done
  for role in "$@"; do wait_for 120 "$role runs on another node than Redis" running "$role"; done
  quietly kubectl uncordon "$node"
  began=$SECONDS
  recovers "moved $*"
}

drill_lose() {
  [ "$(nodes)" -ge 2 ] && [ ${#LOSE[@]} -gt 0 ] || { say "one node only, or no LOSE: none is lost"; return; }
  local node
  [ "$(node_of trainer)" != "$(node_of redis)" ] || move_from_redis trainer
  node=$(node_of trainer)
  say "on $node are: $(roles_on "$node")"
  began=$SECONDS
  "${LOSE[@]}" "$node" >"$SCRATCH/output.log"
  wait_for 120 "$node is lost" is_ready "$node" Unknown
  # As docs/deploy/kubernetes.md says.
  quietly kubectl taint node "$node" node.kubernetes.io/out-of-service=nodeshutdown:NoExecute
  reconnect
  recovers "lost the trainer's node"
  find_again "$node"
  quietly kubectl taint node "$node" node.kubernetes.io/out-of-service-
  began=$SECONDS
  recovers "the node is back"
}

find_again() {
  "${FIND[@]}" "$1" >"$SCRATCH/output.log"
  wait_for 120 "$1 is back" is_ready "$1" True
}

roles_on() { k get pods --field-selector="spec.nodeName=$1" -o 'jsonpath={.items[*].metadata.labels.role}'; }
nothing_on() { [ -z "$(roles_on "$1")" ]; }

# What a spot node's cloud does: a taint announces its end, and half a minute later the node is gone.
drill_taint() {
  [ "$(nodes)" -ge 2 ] && [ ${#LOSE[@]} -gt 0 ] || { say "one node only, or no LOSE: none is announced to be lost"; return; }
  local node pod
  move_from_redis trainer generator
  node=$(node_of trainer)
  say "on $node are: $(roles_on "$node")"
  for role in trainer generator; do
    pod=$(k get pods "-lrole=$role" --field-selector="spec.nodeName=$node" -o 'jsonpath={.items[0].metadata.name}')
    k logs -f "$pod" >"$SCRATCH/$role.log" 2>&1 &
    k get pod "$pod" --watch -o 'jsonpath={.status.containerStatuses[0].state.terminated}{"\n"}' >"$SCRATCH/$role.end" 2>&1 &
  done
  began=$SECONDS
  quietly kubectl taint node "$node" tidemill.test/ends=soon:NoExecute
  wait_for 30 "$node has no pod of the run, before it is gone" nothing_on "$node"
  note "announced: the node's pods have ended"
  sleep "$((began + 30 - SECONDS > 0 ? began + 30 - SECONDS : 0))"
  "${LOSE[@]}" "$node" >"$SCRATCH/output.log"
  reconnect
  recovers "announced, and lost after 30 s"
  for role in trainer generator; do
    say "$role: $(tail -1 "$SCRATCH/$role.log")"
    say "$role: $(grep -m1 exitCode "$SCRATCH/$role.end")"
  done
  find_again "$node"
  quietly kubectl taint node "$node" tidemill.test/ends-
  began=$SECONDS
  recovers "the announced node is back"
}

# --- all of it -------------------------------------------------------------------------------------------------------

if [ ${#LOAD[@]} -gt 0 ]; then
  for role in control feeder reward trainer; do
    quietly "${DOCKER[@]}" build -f deploy/docker/Dockerfile --target "$role" --build-arg "TORCH_INDEX=${TORCH_INDEX:-}" \
      -t "$REGISTRY/tidemill-$role:$TAG" .
  done
  # The engine transformers generates, which the trainer's image has.
  quietly "${DOCKER[@]}" tag "$REGISTRY/tidemill-trainer:$TAG" "$REGISTRY/tidemill-generator:$TAG"
  say "built"
  quietly "${LOAD[@]}" "$REGISTRY"/tidemill-{control,feeder,reward,trainer,generator}":$TAG"
  say "the nodes have the images"
fi

"${TIDEMILL[@]}" kubernetes examples/arithmetic/config.yaml run.name=drill model.path=/tidemill/runs/cache/drill \
  generator.engine=transformers trainer.steps=100000 trainer.batch_groups=32 warm_start.stop_accuracy=0.1 \
  trainer.optimizer.lr=1.0e-5 trainer.checkpoint.every=10 eval.every=1000 eval.dataset.limit=100 \
  --folder "$SCRATCH/objects" --namespace "$SPACE" --registry "$REGISTRY" --tag "$TAG" \
  --trainer-gpus 0 --generator-gpus 0 --storage 1Gi >"$SCRATCH/output.log"
# Requests for a small cluster without GPUs; all else is as it was written.
for each in Deployment/apps/v1/control Deployment/apps/v1/feeder Deployment/apps/v1/reward Deployment/apps/v1/generator \
  Job/batch/v1/trainer StatefulSet/apps/v1/redis; do
  IFS=/ read -r kind group version name <<<"$each"
  small="{name: $name, resources: {requests: {cpu: 50m, memory: 64Mi}}}"
  first=""
  [ "$name" != trainer ] || first="initContainers: [${small/trainer/prepare}], "
  printf -- '---\n{apiVersion: %s/%s, kind: %s, metadata: {name: %s}, spec: {template: {spec: {%scontainers: [%s]}}}}\n' \
    "$group" "$version" "$kind" "$name" "$first" "$small" >>"$SCRATCH/objects/patches.yaml"
done

say "Kubernetes $(kubectl version -o json 2>/dev/null | python3 -c 'import json, sys; print(json.load(sys.stdin)["serverVersion"]["gitVersion"])'), $(nodes) nodes"
kubectl create namespace "$SPACE" >"$SCRATCH/output.log"
kubectl label namespace "$SPACE" pod-security.kubernetes.io/enforce=restricted >"$SCRATCH/output.log"
[ -z "${NAMES:-}" ] || kubectl apply -f - >"$SCRATCH/output.log" <<YAML
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: names, namespace: $SPACE}
spec:
  podSelector: {matchLabels: {app: tidemill, role: reward}}
  policyTypes: [Egress]
  egress: [{to: [{ipBlock: {cidr: $NAMES/32}}], ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]}]
YAML
quietly "${TIDEMILL[@]}" acl "$SCRATCH/objects/config.yaml" --files "$SCRATCH/users" --url redis://redis:6379/0
for role in server feeder generator reward trainer operator; do
  quietly k create secret generic "tidemill-broker-$role" --from-file="$SCRATCH/users/$role"
done
TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(24))')
quietly k create secret generic tidemill-control --from-literal="token=$TOKEN" --from-literal="read_token=$TOKEN-to-look"

began=$SECONDS
quietly "$SCRATCH/objects/apply.sh"
say "applied"
forward
wait_for 600 "the first step is trained" beyond 0
note "apply to the first step"
recovers "apply to the eighth step after"
for drill in $DRILLS; do
  say "== $drill"
  "drill_$drill"
done

began=$SECONDS
quietly k exec deploy/control -- tidemill set /etc/tidemill/config.yaml "steps=$(($(step) + 40))"
wait_for 300 "the run is finished" in_state finished
quietly k wait --for=condition=complete job/trainer --timeout=120s
say "the trainer's Job is complete"
balance=$(status "s['ledger']['balanced'], s['dead_letters']")
counts=$(k exec -i deploy/control -- python - <<'PYTHON'
from broker.client import Broker
from deploy.run.summary import Final, summarise
from schemas.config import load_config
from schemas.run_folder import METRICS, TRAINED, StoredLines, surviving_lines

config = load_config("/etc/tidemill/config.yaml")
ledger = Broker.connect(config).ledger
state = ledger.read_state()
live = ledger.count_live_samples()
final = Final("", published=state.samples_published, dropped=state.samples_dropped, failed=state.samples_failed, live=live)
trained = StoredLines(config.folder / TRAINED)
s = summarise(StoredLines(config.folder / METRICS), trained, final)
steps = {line["step"] for line in surviving_lines(trained)}
missing = len(set(range(max(steps) + 1)) - steps)
print(
    f"{len(steps)} steps, {missing} missing; {s['trajectories']} samples published = {s['trajectories_trained']} trained"
    f" + {state.samples_dropped} dropped + {state.samples_failed} failed + {s['trajectories_excluded']} excluded"
    f" + {live} left; {s['trajectories_lost']} lost, {s['trajectories_trained_twice']} trained twice"
)
PYTHON
)
cat "$TIMES"
[[ $counts == *" 0 lost, "* ]] || { say "something was lost: $counts"; exit 1; }
judge "$balance" "$counts"
