{{/* Where Redis is, and how pods get its secrets. */}}

{{- define "millrace.redisPrefix" -}}
{{- default (include "millrace.cut" (list (printf "%s.%s" .Release.Namespace (include "millrace.fullname" .)) 64)) .Values.redisPrefix -}}
{{- end -}}

{{- define "millrace.redisName" -}}
{{- include "millrace.name" (list . "redis") -}}
{{- end -}}

{{/* host:port of the server; with sentinels theirs, with commas. */}}
{{- define "millrace.redisAddress" -}}
{{- $external := .Values.externalRedis -}}
{{- if .Values.redis.enabled -}}
{{ include "millrace.redisName" . }}.{{ .Release.Namespace }}.svc:6379
{{- else if $external.sentinel.hosts -}}
{{ join "," $external.sentinel.hosts }}
{{- else -}}
{{ $external.host }}:{{ $external.port }}
{{- end -}}
{{- end -}}

{{- define "millrace.redisTls" -}}
{{- if ternary .Values.redis.tls.enabled .Values.externalRedis.tls.enabled .Values.redis.enabled }}true{{ end -}}
{{- end -}}

{{- define "millrace.redisUrl" -}}
{{- $external := .Values.externalRedis -}}
{{- $scheme := ternary "rediss" "redis" (eq "true" (include "millrace.redisTls" .)) -}}
{{- $address := include "millrace.redisAddress" . -}}
{{- if .Values.redis.enabled -}}
{{ $scheme }}://{{ $address }}/0
{{- else if $external.sentinel.hosts -}}
{{ $scheme }}+sentinel://{{ $address }}/{{ $external.sentinel.master }}/{{ $external.db }}
{{- else -}}
{{ $scheme }}://{{ $address }}/{{ $external.db }}
{{- end -}}
{{- end -}}

{{/* Name and key of the secret with the password, as `name: .. key: ..`; empty without one. */}}
{{- define "millrace.redisPassword" -}}
{{- if .Values.redis.enabled -}}
{{- $auth := .Values.redis.auth -}}
{{- if $auth.existingSecret -}}
{{- dict "name" $auth.existingSecret "key" $auth.existingSecretKey | toYaml -}}
{{- else -}}
{{- dict "name" (include "millrace.redisName" .) "key" "redis-password" | toYaml -}}
{{- end -}}
{{- else if .Values.externalRedis.existingSecret -}}
{{- dict "name" .Values.externalRedis.existingSecret "key" .Values.externalRedis.existingSecretKey | toYaml -}}
{{- else if .Values.externalRedis.password -}}
{{- dict "name" (include "millrace.redisName" .) "key" "redis-password" | toYaml -}}
{{- end -}}
{{- end -}}

{{/* Name and key of the secret with the certificate authority; empty without one. */}}
{{- define "millrace.redisCa" -}}
{{- if .Values.redis.enabled -}}
{{- if .Values.redis.tls.enabled }}{{ dict "name" .Values.redis.tls.existingSecret "key" "ca.crt" | toYaml }}{{ end -}}
{{- else if and .Values.externalRedis.tls.enabled .Values.externalRedis.tls.caSecret -}}
{{- dict "name" .Values.externalRedis.tls.caSecret "key" .Values.externalRedis.tls.caSecretKey | toYaml -}}
{{- end -}}
{{- end -}}

{{- define "millrace.redisEnv" -}}
- {name: MILLRACE_REDIS_URL, value: {{ include "millrace.redisUrl" . | quote }}}
- {name: MILLRACE_REDIS_PREFIX, value: {{ include "millrace.redisPrefix" . | quote }}}
{{- if include "millrace.redisPassword" . }}
- {name: MILLRACE_REDIS_PASSWORD_FILE, value: /etc/millrace/redis/password}
{{- end }}
{{- if include "millrace.redisCa" . }}
- {name: MILLRACE_REDIS_CA_FILE, value: /etc/millrace/redis-ca/ca.crt}
{{- end }}
{{- $external := .Values.externalRedis }}
{{- if not .Values.redis.enabled }}
{{- with $external.username }}
- {name: MILLRACE_REDIS_USERNAME, value: {{ . | quote }}}
{{- end }}
{{- if $external.sentinel.hosts }}
{{- with $external.sentinel.username }}
- {name: MILLRACE_REDIS_SENTINEL_USERNAME, value: {{ . | quote }}}
{{- end }}
{{- with $external.sentinel.existingSecret }}
- name: MILLRACE_REDIS_SENTINEL_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ . }}, key: {{ $external.sentinel.existingSecretKey }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "millrace.redisMounts" -}}
{{- if include "millrace.redisPassword" . }}
- {name: redis-password, mountPath: /etc/millrace/redis, readOnly: true}
{{- end }}
{{- if include "millrace.redisCa" . }}
- {name: redis-ca, mountPath: /etc/millrace/redis-ca, readOnly: true}
{{- end }}
{{- end -}}

{{- define "millrace.redisVolumes" -}}
{{- with include "millrace.redisPassword" . | fromYaml }}
- name: redis-password
  secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: password}]}
{{- end }}
{{- with include "millrace.redisCa" . | fromYaml }}
- name: redis-ca
  secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: ca.crt}]}
{{- end }}
{{- end -}}
