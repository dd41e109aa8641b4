#!/bin/sh
# Applies this folder: the configuration and all services. A Job can't be changed, so one that differs, or has ended, is
# made again: it resumes from its checkpoint and the journal. Nothing is changed if Kubernetes rejects any object.
set -eu
cd "$(dirname "$0")"
objects=$(mktemp)
trap 'rm -f "$objects"' EXIT
kubectl kustomize . >"$objects"
job=$(sed -n '/^kind: Job$/,/^---$/ s/^  name: //p' "$objects")
namespace=$(sed -n 's/^namespace: //p' kustomization.yaml)
# On trial under another name: a Job that is there rejects every change.
sed '/^kind: Job$/,/^---$/ s/^  name: .*/&-trial/' "$objects" | kubectl apply --dry-run=server -f - >/dev/null
kubectl apply -f priority.yaml
running=$(kubectl -n "$namespace" get job "$job" --ignore-not-found -o 'jsonpath={.status.active}')
[ -n "$running" ] && kubectl diff -l "role=$job" -f "$objects" >/dev/null 2>&1 ||
    kubectl -n "$namespace" delete job "$job" --ignore-not-found --wait --timeout=330s
kubectl apply -f "$objects"
