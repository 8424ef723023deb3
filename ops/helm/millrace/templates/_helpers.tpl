{{/* Names, labels, images and the models; knows nothing of pods. */}}

{{/* Cut a name to a length; what is cut off is told apart by a hash. Takes (list name length). */}}
{{- define "millrace.cut" -}}
{{- $name := index . 0 -}}
{{- $length := index . 1 | int -}}
{{- if gt (len $name) $length -}}
{{- printf "%s-%s" ($name | trunc (sub $length 9 | int) | trimAll "-.") (sha256sum $name | trunc 8) -}}
{{- else -}}
{{- $name | trimAll "-." -}}
{{- end -}}
{{- end -}}

{{- define "millrace.chartName" -}}
{{- include "millrace.cut" (list (default .Chart.Name .Values.nameOverride) 63) -}}
{{- end -}}

{{- define "millrace.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if eq $name .Release.Name -}}{{ $name }}{{- else -}}{{ printf "%s-%s" .Release.Name $name }}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of an object: the release's, and a part. 46 characters leave room for what a Deployment adds to the names of
its pods: these are host names, of at most 63, and Millrace tells instances apart by them. Takes (list $ part). */}}
{{- define "millrace.name" -}}
{{- $root := index . 0 -}}
{{- include "millrace.cut" (list (printf "%s-%s" (include "millrace.fullname" $root) (index . 1)) 46) -}}
{{- end -}}

{{/* Labels that select the pods of a part. Takes (list $ role model), model may be empty. */}}
{{- define "millrace.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "millrace.chartName" $root }}
app.kubernetes.io/instance: {{ include "millrace.cut" (list $root.Release.Name 63) }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with index . 2 }}
millrace/model: {{ . }}
{{- end }}
{{- end -}}

{{- define "millrace.labels" -}}
{{ include "millrace.selector" . }}
{{- $root := index . 0 }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: millrace
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ include "millrace.cut" (list (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_") 63) }}
{{- end -}}

{{/* Image of Millrace's own. Takes (list $ repository). */}}
{{- define "millrace.image" -}}
{{- $root := index . 0 -}}
{{- $image := $root.Values.image -}}
{{- $registry := default $image.registry $root.Values.global.imageRegistry -}}
{{- with $registry }}{{ trimSuffix "/" . }}/{{ end }}{{ index . 1 }}:{{ default $root.Chart.AppVersion $image.tag }}
{{- end -}}

{{- define "millrace.redisImage" -}}
{{- with .Values.global.imageRegistry }}{{ trimSuffix "/" . }}/{{ end }}{{ .Values.redis.image }}
{{- end -}}

{{- define "millrace.pullSecrets" -}}
{{- with concat (default list .Values.global.imagePullSecrets) .Values.imagePullSecrets -}}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{- define "millrace.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "millrace.cut" (list (include "millrace.fullname" .) 63)) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Class of a claim. Takes (list $ class). */}}
{{- define "millrace.storageClass" -}}
{{- $root := index . 0 -}}
{{- with default $root.Values.global.storageClass (index . 1) -}}
storageClassName: {{ . | quote }}
{{- end -}}
{{- end -}}

{{/* All models with their values filled in, as a map under `models`. Each knows its `key` and its `servedName`. */}}
{{- define "millrace.models" -}}
{{- $root := . -}}
{{- $models := dict -}}
{{- range $key, $given := default (dict "embedded" dict) .Values.models -}}
{{- $model := mergeOverwrite (deepCopy $root.Values.modelDefaults) (default dict $given | deepCopy) -}}
{{- $source := $model.source -}}
{{- $name := $key -}}
{{- if eq $source.type "embedded" }}{{ $name = "smollm2-135m-instruct" }}{{ end -}}
{{- if eq $source.type "hub" }}{{ $name = $source.id }}{{ end -}}
{{- $_ := set $model "servedName" (default $name $model.servedName) -}}
{{- $_ := set $model "key" $key -}}
{{- $_ := set $models $key $model -}}
{{- end -}}
{{- dict "models" $models | toYaml -}}
{{- end -}}

{{/* Served name of the model whose state the api tells. */}}
{{- define "millrace.defaultModel" -}}
{{- $models := (include "millrace.models" . | fromYaml).models -}}
{{- $key := default (keys $models | sortAlpha | first) .Values.defaultModel -}}
{{- if not (hasKey $models $key) -}}
{{- fail (printf "defaultModel: there is no %q in models (%s)" $key (keys $models | sortAlpha | join ", ")) -}}
{{- end -}}
{{- (get $models $key).servedName -}}
{{- end -}}

{{/* Whether there may be more than one pod of a workload: "true" or "". Takes its values. */}}
{{- define "millrace.isMany" -}}
{{- if .autoscaling.enabled -}}
{{- if gt (int .autoscaling.maxReplicas) 1 }}true{{ end -}}
{{- else if gt (int .replicas) 1 -}}
true
{{- end -}}
{{- end -}}

{{/* Whether to make an object of a kind that a cluster may not know. Takes (list $ enabled apiVersion). */}}
{{- define "millrace.wanted" -}}
{{- $root := index . 0 -}}
{{- $enabled := index . 1 | toString -}}
{{- if or (eq $enabled "true") (and (eq $enabled "auto") ($root.Capabilities.APIVersions.Has (index . 2))) }}true{{ end -}}
{{- end -}}
