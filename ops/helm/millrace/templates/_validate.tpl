{{/* What the schema cannot say: values that do not go together. Each message names the values and the way out. */}}

{{- define "millrace.validate" -}}
{{- $external := .Values.externalRedis -}}
{{- $outside := or $external.host $external.sentinel.hosts -}}
{{- if and .Values.redis.enabled $outside -}}
{{- fail "externalRedis is filled in, but redis.enabled is true: set redis.enabled to false, or leave externalRedis empty" -}}
{{- end -}}
{{- if not (or .Values.redis.enabled $outside) -}}
{{- fail "redis.enabled is false: fill in externalRedis.host, or externalRedis.sentinel.hosts and .master" -}}
{{- end -}}
{{- if and $external.host $external.sentinel.hosts -}}
{{- fail "externalRedis.host and externalRedis.sentinel.hosts are both set: the sentinels know the host, leave it empty" -}}
{{- end -}}
{{- if and $external.sentinel.hosts (not $external.sentinel.master) -}}
{{- fail "externalRedis.sentinel.master is empty: the sentinels watch masters by name" -}}
{{- end -}}
{{- if and .Values.redis.enabled .Values.redis.tls.enabled (not .Values.redis.tls.existingSecret) -}}
{{- fail "redis.tls.enabled needs redis.tls.existingSecret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- $models := (include "millrace.models" . | fromYaml).models -}}
{{- $seen := dict -}}
{{- range $key, $model := $models -}}
{{- with get $seen $model.servedName -}}
{{- fail (printf "models.%s and models.%s have the same servedName %q" . $key $model.servedName) -}}
{{- end -}}
{{- $_ := set $seen $model.servedName $key -}}
{{- include "millrace.validateModel" (list $ (printf "models.%s" $key) $model) -}}
{{- end -}}
{{- include "millrace.validateScaling" (list "api" .Values.api.autoscaling) -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: the gateway it belongs to" -}}
{{- end -}}
{{- end -}}

{{- define "millrace.validateModel" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $model := index . 2 -}}
{{- $source := $model.source -}}
{{- $needed := get (dict "hub" "id" "claim" "claim" "image" "image" "path" "path" "embedded" "") $source.type -}}
{{- if and $needed (not (get $source $needed)) -}}
{{- fail (printf "%s.source.type is %q: %s.source.%s is needed" $name $source.type $name $needed) -}}
{{- end -}}
{{- if and (eq $source.type "path") (not (hasPrefix "/" $source.path)) -}}
{{- fail (printf "%s.source.path is %q: with type `path` it begins with /" $name $source.path) -}}
{{- end -}}
{{- if and (eq $source.type "embedded") $source.id -}}
{{- fail (printf "%s.source.id is set, but its type is embedded: set %s.source.type to hub" $name $name) -}}
{{- end -}}
{{- if and (eq $source.type "image") (semverCompare "<1.33.0-0" $root.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "%s.source.type image needs Kubernetes 1.33, this is %s" $name $root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- $given := get (default dict $model.resources.limits) $model.gpu.resourceName -}}
{{- if $given -}}
{{- fail (printf "%s.resources.limits has %s %v: GPUs follow from tensorParallelSize (%v) and accelerator" $name $model.gpu.resourceName $given $model.tensorParallelSize) -}}
{{- end -}}
{{- if and $model.warmup (ne $model.accelerator "gpu") -}}
{{- fail (printf "%s.warmup compiles kernels for GPUs, but its accelerator is %s" $name $model.accelerator) -}}
{{- end -}}
{{- $cache := $model.cache -}}
{{- if and $cache.persistent (not $cache.existingClaim) (eq "true" (include "millrace.isMany" $model)) (not (has "ReadWriteMany" $cache.accessModes)) -}}
{{- fail (printf "%s has more than one scheduler: its cache.accessModes need ReadWriteMany, or cache.persistent false" $name) -}}
{{- end -}}
{{- if and $model.autoscaling.enabled (not $model.autoscaling.serverAddress) -}}
{{- fail (printf "%s.autoscaling.enabled needs %s.autoscaling.serverAddress: the Prometheus that KEDA asks" $name $name) -}}
{{- end -}}
{{- include "millrace.validateScaling" (list $name $model.autoscaling) -}}
{{- include "millrace.validateScaling" (list (printf "%s.tokenizer" $name) $model.tokenizer.autoscaling) -}}
{{- include "millrace.validateScaling" (list (printf "%s.detokenizer" $name) $model.detokenizer.autoscaling) -}}
{{- end -}}

{{- define "millrace.validateScaling" -}}
{{- $scaling := index . 1 -}}
{{- if and $scaling.enabled (gt (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- fail (printf "%s.autoscaling: minReplicas %v is above maxReplicas %v" (index . 0) $scaling.minReplicas $scaling.maxReplicas) -}}
{{- end -}}
{{- end -}}
