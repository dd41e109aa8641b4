{{- /* Name of an object of this release, so that a namespace holds several runs: (list $ "generator"). */ -}}
{{- define "tidemill.name" -}}
{{- $root := index . 0 }}{{ if not $root.Values.plain }}{{ $root.Release.Name }}-{{ end }}{{ index . 1 -}}
{{- end }}

{{- /* The same for objects that are named after Tidemill in plain files, such as its secrets. */ -}}
{{- define "tidemill.owned" -}}
{{- $root := index . 0 }}{{ ternary "tidemill" $root.Release.Name $root.Values.plain }}-{{ index . 1 -}}
{{- end }}

{{- /* Name of a secret: (list $ "hub"). */ -}}
{{- define "tidemill.secret" -}}
{{- $root := index . 0 }}{{ get $root.Values.secrets (index . 1) | default (include "tidemill.owned" .) -}}
{{- end }}

{{- /* Labels of an object, within braces: (list $ "role"), or (list $ "generator" "pool"); both may be "". */ -}}
{{- define "tidemill.labels" -}}
{{- $root := index . 0 -}}
app: tidemill{{ if not $root.Values.plain }}, app.kubernetes.io/instance: {{ $root.Release.Name | quote }}{{ end }}{{ with index . 1 }}, role: {{ . }}{{ end }}{{ with rest (rest .) }}{{ with first . }}, pool: {{ . | quote }}{{ end }}{{ end -}}
{{- end }}

{{- /* Labels of a workload: those and its own, such as a queue's of Kueue. */ -}}
{{- define "tidemill.workloadLabels" -}}
{{- $root := index . 0 -}}
{{ include "tidemill.labels" . }}{{ range $key, $value := (get $root.Values (index . 1)).labels }}, {{ $key }}: {{ $value | quote }}{{ end -}}
{{- end }}

{{- /* Image of a role; those of roles that can have GPUs are others with them. */ -}}
{{- define "tidemill.image" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $own := get $root.Values $role -}}
{{- if $own.image }}{{ $own.image }}{{ else if $root.Values.plain }}tidemill-{{ $role }}{{ else -}}
{{ $root.Values.images.registry }}/tidemill-{{ $role }}:{{ $root.Values.images.tag }}{{ if $own.gpus }}-cuda{{ end }}{{ end -}}
{{- end }}

{{- /* What all pods of ours begin with: (list $ "reward"). */ -}}
{{- define "tidemill.pod" -}}
{{- $root := index . 0 -}}{{- $own := get $root.Values (index . 1) -}}
automountServiceAccountToken: false
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- with $own.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  # Else every start of a pod walks through the whole volume.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* A container's rights. */ -}}
{{- define "tidemill.rights" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* A container's resources, with its GPUs: (list $ "trainer"). */ -}}
{{- define "tidemill.resources" -}}
{{- $own := get (index . 0).Values (index . 1) -}}
{{- $gpus := dict -}}{{- if $own.gpus }}{{ $gpus = dict "nvidia.com/gpu" $own.gpus }}{{ end -}}
resources:
  requests: {{ include "tidemill.amounts" (merge (deepCopy $own.requests) $gpus) }}
  limits: {{ include "tidemill.amounts" (merge (deepCopy $own.limits) $gpus) }}
{{- end }}

{{- define "tidemill.amounts" -}}
{ {{- range $index, $name := keys . | sortAlpha }}{{ if $index }}, {{ end }}{{ $name }}: {{ get $ $name | toString | quote }}{{ end -}} }
{{- end }}

{{- /* Devices of the trainer, and of one generator of each kind that has any. */ -}}
{{- define "tidemill.devices" -}}
{{- $trainer := .Values.trainer }}{{ $generator := .Values.generator -}}
{{- $found := dict "trainer" (mul $trainer.nodes ($trainer.gpus | default $trainer.ranks)) -}}
{{- range $pool, $own := $generator.pools | default (dict "" dict) -}}
{{- with dig "gpus" $generator.gpus $own }}{{ $_ := set $found (printf "generator.%s" $pool | trimSuffix ".") . }}{{ end -}}
{{- end }}{{ toJson $found -}}
{{- end }}

{{- /* The volume of the run's files for a role: an own disk where only one node can mount it. */ -}}
{{- define "tidemill.runs" -}}
{{- $root := index . 0 -}}
{{- if and (eq $root.Values.storage.accessMode "ReadWriteOnce") (has (index . 1) (list "feeder" "generator" "reward")) -}}
{name: runs, emptyDir: {}}
{{- else -}}
{name: runs, persistentVolumeClaim: {claimName: {{ $root.Values.storage.existingClaim | default (include "tidemill.owned" (list $root "runs")) }}}}
{{- end -}}
{{- end }}

{{- /* The configuration and the user of the broker, which a whole run has itself: (list $ "reward"). */ -}}
{{- define "tidemill.volumes" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
{{- $broker := printf "%s-%s" (include "tidemill.secret" (list $root "broker")) (ternary "operator" $role (eq $role "control")) -}}
- {name: config, configMap: {name: {{ include "tidemill.owned" (list $root "config") }}}}
{{- if eq $role "run" }}
{{- else if $root.Values.broker.caSecret }}
- {name: broker, projected: {sources: [{secret: {name: {{ $broker }}}}, {secret: {name: {{ $root.Values.broker.caSecret }}}}]}}
{{- else }}
- {name: broker, secret: {secretName: {{ $broker }}}}
{{- end }}
- {{ include "tidemill.runs" . }}
- {name: tmp, emptyDir: {}}
{{- end }}

{{- /* Mounts of them, the volume being for reading only unless the third says so. */ -}}
{{- define "tidemill.mounts" -}}
- {name: config, mountPath: /etc/tidemill, readOnly: true}
{{- if ne (index . 1) "run" }}
- {name: broker, mountPath: /run/secrets/tidemill, readOnly: true}
{{- end }}
- {name: runs, mountPath: /tidemill/runs{{ if not (index . 2) }}, readOnly: true{{ end }}}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- /* Where the broker is. */ -}}
{{- define "tidemill.broker" -}}
- {name: REDIS_URL_FILE, value: /run/secrets/tidemill/redis_url}
{{- end }}

{{- /* That, and the port of probes. */ -}}
{{- define "tidemill.env" -}}
{{ include "tidemill.broker" . }}
- {name: TIDEMILL_PROBES__PORT, value: "8641"}
{{- end }}

{{- /* Readiness: a fresh heartbeat in the broker. */ -}}
{{- define "tidemill.ready" -}}
ports: [{name: probes, containerPort: 8641}]
readinessProbe: {httpGet: {path: /readyz, port: probes}, periodSeconds: 5}
{{- end }}

{{- /* The number of a pod of a Job, by which its ranks find each other. */ -}}
{{- define "tidemill.index" -}}
- name: JOB_COMPLETION_INDEX
  valueFrom: {fieldRef: {fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
{{- end }}

{{- /* Shell that waits for a file. */ -}}
{{- define "tidemill.waitScript" -}}
for _ in $(seq 1800); do [ ! -e "$0" ] || exit 0; sleep 2; done; echo "no $0 after an hour" >&2; exit 1
{{- end }}

{{- /* Models of the hub: downloaded once, into the volume. */ -}}
{{- define "tidemill.hub" -}}
- {name: HF_HOME, value: /tidemill/runs/cache/hub}
- {name: HF_TOKEN_PATH, value: /run/secrets/hub/token}
{{- end }}

{{- /* Rolls the pods when the configuration changes; kustomize names the ConfigMap after its content instead. */ -}}
{{- define "tidemill.podMetadata" -}}
{{- $root := index . 0 -}}
metadata: {labels: { {{- include "tidemill.labels" . -}} }{{ if not $root.Values.plain }}, annotations: {checksum/config: {{ include "tidemill.checksum" $root }}}{{ end }}}
{{- end }}

{{- define "tidemill.checksum" -}}
{{- sha256sum (toJson (list .Values.config .Values.files)) | trunc 16 -}}
{{- end }}

{{- /* A Job can't be changed: its name changes with what it holds, so that an upgrade makes it again, and only then. */ -}}
{{- define "tidemill.job" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}{{- $values := $root.Values -}}
{{- if $values.plain }}{{ $role }}{{ else -}}
{{- $all := list $root.Chart.Version $values.config $values.files $values.images (get $values $role) $values.storage $values.secrets $values.broker.caSecret -}}
{{ $root.Release.Name }}-{{ $role }}-{{ sha256sum (toJson $all) | trunc 8 }}{{ end -}}
{{- end }}

{{- /* What a Job does about a pod that ends. */ -}}
{{- define "tidemill.failures" -}}
backoffLimit: 100
podFailurePolicy:
  rules:
    # A drained node is no failure.
    - action: Ignore
      onPodConditions: [{type: DisruptionTarget, status: "True"}]
    # 2 is a wrong configuration, 3 another trainer of this run, 6 a run that can't continue: a restart mends none.
    - action: FailJob
      onExitCodes: {operator: In, values: [2, 3, 6]}
{{- end }}

{{- /* The way to the control plane in pods of a role: (list $ "control"). */ -}}
{{- define "tidemill.dashboard" -}}
{{- $root := index . 0 -}}{{- $name := include "tidemill.name" (list $root "control") -}}
# The dashboard and the REST interface: kubectl -n {{ $root.Release.Namespace }} port-forward service/{{ $name }} 8642, then
# http://127.0.0.1:8642/ with the token of the secret {{ include "tidemill.secret" (list $root "control") }}. It serves no TLS: put an ingress that does before
# it to reach it from elsewhere.
apiVersion: v1
kind: Service
metadata: {name: {{ $name }}, labels: { {{- include "tidemill.labels" . -}} }}
spec:
  selector: { {{- include "tidemill.labels" . -}} }
  ports: [{name: http, port: 8642}]
{{- end }}

{{- /* Where the control plane listens, and its tokens. */ -}}
{{- define "tidemill.listen" -}}
- {name: TIDEMILL_CONTROL__HOST, value: 0.0.0.0}
- {name: TIDEMILL_CONTROL__PORT, value: "8642"}
- {name: TIDEMILL_CONTROL_TOKEN_FILE, value: /run/secrets/control/token}
# The token that may only look: KEDA and Prometheus need no other.
- {name: TIDEMILL_CONTROL_READ_TOKEN_FILE, value: /run/secrets/control/read_token}
{{- end }}

{{- /* A rule of a NetworkPolicy for the cluster's name servers. */ -}}
{{- define "tidemill.names" -}}
# Names: the cluster's own servers, and the cache that some clusters have on each node.
- to:
    {{- toYaml .Values.nameServers | nindent 4 }}
  ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end }}
