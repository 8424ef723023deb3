{{/* What the pods of all four services have in common. Most helpers take a dict: root, role, values (of the workload),
model (of a worker; the api has none). */}}

{{/* Port of a service's probes and metrics. */}}
{{- define "millrace.port" -}}
{{- get (dict "api" 8000 "tokenizer" 9101 "scheduler" 9102 "detokenizer" 9103) . -}}
{{- end -}}

{{- define "millrace.portName" -}}
{{- ternary "http" "metrics" (eq . "api") -}}
{{- end -}}

{{/* Seconds a service may take to finish. */}}
{{- define "millrace.drain" -}}
{{- ternary .root.Values.api.drainTimeoutSeconds .root.Values.drain.timeoutSeconds (eq .role "api") | int -}}
{{- end -}}

{{/* From the decision to end a pod to its kill: preStop, drain, buffer. */}}
{{- define "millrace.gracePeriod" -}}
{{- $preStop := ternary .root.Values.api.preStopSeconds 0 (eq .role "api") | int -}}
{{- add $preStop (include "millrace.drain" .) .root.Values.drain.bufferSeconds -}}
{{- end -}}

{{/* Seconds that a rollout may wait for a pod: its start probe's, and a minute. */}}
{{- define "millrace.deadline" -}}
{{- add (mul .Values.probes.startup.periodSeconds .Values.probes.startup.failureThreshold) 60 -}}
{{- end -}}

{{/* A map of settings in camel case as variables. */}}
{{- define "millrace.settings" -}}
{{- range $name, $value := . }}
- name: MILLRACE_{{ $name | snakecase | upper }}
{{- if kindIs "slice" $value }}
  value: {{ join "," $value | quote }}
{{- else if kindIs "string" $value }}
  value: {{ $value | quote }}
{{- else }}
  value: {{ $value | toJson | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What MILLRACE_MODEL says: empty for the embedded model. */}}
{{- define "millrace.modelPath" -}}
{{- $source := .source -}}
{{- if eq $source.type "hub" -}}
{{ $source.id }}
{{- else if eq $source.type "path" -}}
{{ $source.path }}
{{- else if ne $source.type "embedded" -}}
{{ printf "/models/%s" $source.path | trimSuffix "/" }}
{{- end -}}
{{- end -}}

{{/* Whether an init container fetches the model: "true" or "". Takes the model. */}}
{{- define "millrace.downloads" -}}
{{- if and (eq .source.type "hub") .download }}true{{ end -}}
{{- end -}}

{{- define "millrace.modelEnv" -}}
{{- $model := .model -}}
{{- with include "millrace.modelPath" $model }}
- {name: MILLRACE_MODEL, value: {{ . | quote }}}
{{- end }}
{{- if eq $model.source.type "hub" }}
- {name: MILLRACE_MODEL_SOURCE, value: {{ $model.source.hub }}}
{{- with $model.source.revision }}
- {name: MILLRACE_MODEL_REVISION, value: {{ . | quote }}}
{{- end }}
{{- end }}
{{- end -}}

{{- define "millrace.hubEnv" -}}
{{- $hub := .Values.huggingface -}}
{{- with $hub.endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- if or $hub.token $hub.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ default (include "millrace.name" (list . "hub")) $hub.existingSecret }}
      key: {{ ternary $hub.existingSecretKey "HF_TOKEN" (ne "" $hub.existingSecret) }}
{{- end }}
{{- end -}}

{{- define "millrace.env" -}}
{{- $root := .root -}}
- name: MILLRACE_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- {name: MILLRACE_SERVED_MODEL_NAME, value: {{ (eq .role "api") | ternary (include "millrace.defaultModel" $root) (default dict .model).servedName | quote }}}
- {name: MILLRACE_DRAIN_TIMEOUT, value: {{ include "millrace.drain" . | quote }}}
{{ include "millrace.redisEnv" $root }}
{{- if .model }}
{{- include "millrace.modelEnv" . }}
{{- if eq .model.source.type "hub" }}
{{- if include "millrace.downloads" .model }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- else }}
{{- include "millrace.hubEnv" $root }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .role "scheduler" }}
- {name: MILLRACE_DEVICE, value: {{ ternary "cuda" "cpu" (eq .model.accelerator "gpu") }}}
- {name: MILLRACE_TENSOR_PARALLEL_SIZE, value: {{ .model.tensorParallelSize | quote }}}
{{- end }}
{{- if eq .role "api" }}
{{- $auth := $root.Values.api.auth }}
{{- if or $auth.keys $auth.existingSecret }}
- {name: MILLRACE_API_KEYS_FILE, value: /etc/millrace/api-keys/keys}
{{- end }}
{{- with include "millrace.metricsKey" $root | fromYaml }}
- name: MILLRACE_METRICS_KEY
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end }}
{{- include "millrace.settings" (merge (deepCopy .values.settings) $root.Values.settings) }}
{{- with .values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name and key of the secret with the key of /metrics; empty without one. */}}
{{- define "millrace.metricsKey" -}}
{{- $auth := .Values.api.auth -}}
{{- if $auth.metricsExistingSecret -}}
{{- dict "name" $auth.metricsExistingSecret "key" $auth.metricsExistingSecretKey | toYaml -}}
{{- else if $auth.metricsKey -}}
{{- dict "name" (include "millrace.name" (list . "api")) "key" "metrics-key" | toYaml -}}
{{- end -}}
{{- end -}}

{{- define "millrace.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- include "millrace.redisMounts" .root }}
{{- if .model }}
- {name: cache, mountPath: /cache}
{{- if has .model.source.type (list "claim" "image") }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
{{- if eq .role "scheduler" }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- $auth := .root.Values.api.auth }}
{{- if and (eq .role "api") (or $auth.keys $auth.existingSecret) }}
- {name: api-keys, mountPath: /etc/millrace/api-keys, readOnly: true}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "millrace.volumes" -}}
- {name: tmp, emptyDir: {}}
{{- include "millrace.redisVolumes" .root }}
{{- if .model }}
{{- $cache := .model.cache }}
- name: cache
{{- if and (eq .role "scheduler") (or $cache.persistent $cache.existingClaim) }}
  persistentVolumeClaim: {claimName: {{ default (include "millrace.name" (list .root (printf "cache-%s" .model.key))) $cache.existingClaim }}}
{{- else }}
  emptyDir: {}
{{- end }}
{{- if eq .model.source.type "claim" }}
- name: models
  persistentVolumeClaim: {claimName: {{ .model.source.claim }}, readOnly: true}
{{- else if eq .model.source.type "image" }}
- name: models
  image: {reference: {{ .model.source.image | quote }}, pullPolicy: {{ .root.Values.image.pullPolicy }}}
{{- end }}
{{- end }}
{{- if eq .role "scheduler" }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ default (ternary "8Gi" "1Gi" (gt (int .model.tensorParallelSize) 1)) .model.shmSize }}}
{{- end }}
{{- $auth := .root.Values.api.auth }}
{{- if and (eq .role "api") (or $auth.keys $auth.existingSecret) }}
- name: api-keys
  secret:
    secretName: {{ default (include "millrace.name" (list .root "api")) $auth.existingSecret }}
    items: [{key: {{ ternary $auth.existingSecretKey "api-keys" (ne "" $auth.existingSecret) }}, path: keys}]
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "millrace.probe" -}}
httpGet: {path: {{ index . 0 }}, port: {{ index . 1 }}}
{{ toYaml (index . 2) }}
{{- end -}}

{{- define "millrace.securityContext" -}}
{{- toYaml .root.Values.securityContext }}
readOnlyRootFilesystem: {{ ternary .values.readOnlyRootFilesystem true (eq .role "scheduler") }}
{{- end -}}

{{/* Resources of the service's container: GPUs follow from the ranks. */}}
{{- define "millrace.resources" -}}
{{- $resources := deepCopy .values.resources -}}
{{- if and (eq .role "scheduler") (eq .model.accelerator "gpu") -}}
{{- if .model.gpu.resourceClaims -}}
{{- $claims := list -}}
{{- range .model.gpu.resourceClaims }}{{ $claims = append $claims (dict "name" .name) }}{{ end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- else -}}
{{- $gpus := dict .model.gpu.resourceName (.model.tensorParallelSize | toString) -}}
{{- $_ := set $resources "limits" (merge $gpus (default dict $resources.limits)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Fetches the model's files into the cache; a failure is seen as one of this container. */}}
{{- define "millrace.download" -}}
- name: download
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, -c]
  args:
    - |
      import os
      from shared.model_files import locate
      read = lambda name: os.environ.get(f"MILLRACE_{name}", "")
      locate(read("MODEL"), read("MODEL_SOURCE"), revision=read("MODEL_REVISION"), weights={{ ternary "True" "False" (eq .role "scheduler") }})
  env:
    {{- include "millrace.modelEnv" . | trim | nindent 4 }}
    {{- with include "millrace.hubEnv" .root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml .values.resources | nindent 4 }}
  securityContext:
    {{- include "millrace.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /cache}
{{- end -}}

{{/* Compiles the kernels that the scheduler will need, with its own settings and on its own GPUs. */}}
{{- define "millrace.warmup" -}}
- name: warmup
  image: {{ .image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  args: [services.launcher, warmup]
  env:
    {{- include "millrace.env" . | nindent 4 }}
  resources:
    {{- include "millrace.resources" . | nindent 4 }}
  securityContext:
    {{- include "millrace.securityContext" . | nindent 4 }}
  volumeMounts:
    {{- include "millrace.mounts" . | nindent 4 }}
{{- end -}}

{{- define "millrace.placement" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.topologySpreadConstraints }}
topologySpreadConstraints:
{{- range . }}
{{- $own := dict "labelSelector" (dict "matchLabels" (include "millrace.selector" (list $.root $.role $.key) | fromYaml)) }}
  - {{ toYaml (merge (deepCopy .) $own) | indent 4 | trim }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A Deployment's `template`. Takes the dict, with image and key (of the model, or empty) too. */}}
{{- define "millrace.podTemplate" -}}
{{- $root := .root -}}
{{- $port := include "millrace.portName" .role -}}
metadata:
  labels:
    {{- include "millrace.selector" (list $root .role .key) | nindent 4 }}
    {{- with .values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/secrets: {{ include "millrace.secretSum" $root }}
    {{- with .values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "millrace.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with include "millrace.pullSecrets" $root }}
  {{- . | nindent 2 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ include "millrace.gracePeriod" . }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- if eq .role "scheduler" }}
  {{- with .model.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if and (eq .model.accelerator "gpu") .model.gpu.resourceClaims }}
  resourceClaims:
    {{- toYaml .model.gpu.resourceClaims | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with include "millrace.placement" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- $downloads := and .model (include "millrace.downloads" .model) }}
  {{- $warms := and .model (eq .role "scheduler") .model.warmup }}
  {{- if or $downloads $warms }}
  initContainers:
    {{- if $downloads }}
    {{- include "millrace.download" . | nindent 4 }}
    {{- end }}
    {{- if $warms }}
    {{- include "millrace.warmup" . | nindent 4 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ .image }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: [services.{{ .role }}]
      env:
        {{- include "millrace.env" . | nindent 8 }}
      ports:
        - {name: {{ $port }}, containerPort: {{ include "millrace.port" .role }}}
      startupProbe:
        {{- include "millrace.probe" (list "/startupz" $port $root.Values.probes.startup) | nindent 8 }}
      readinessProbe:
        {{- include "millrace.probe" (list "/readyz" $port $root.Values.probes.readiness) | nindent 8 }}
      livenessProbe:
        {{- include "millrace.probe" (list "/livez" $port $root.Values.probes.liveness) | nindent 8 }}
      {{- if and (eq .role "api") $root.Values.api.preStopSeconds }}
      lifecycle:
        preStop:
          exec: {command: [python, -I, -c, "import time; time.sleep({{ $root.Values.api.preStopSeconds }})"]}
      {{- end }}
      resources:
        {{- include "millrace.resources" . | nindent 8 }}
      securityContext:
        {{- include "millrace.securityContext" . | nindent 8 }}
      volumeMounts:
        {{- include "millrace.mounts" . | nindent 8 }}
  volumes:
    {{- include "millrace.volumes" . | nindent 4 }}
{{- end -}}

{{/* Changes with the secrets that the chart is given and pods read at their start alone, so that they are started again.
The api reads its keys whenever they change. */}}
{{- define "millrace.secretSum" -}}
{{- $given := list .Values.redis.auth .Values.externalRedis.password .Values.api.auth.metricsKey .Values.huggingface -}}
{{- $given | toJson | sha256sum -}}
{{- end -}}
