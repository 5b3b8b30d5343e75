{{- define "genserve.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "genserve.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "genserve.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "genserve.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "genserve.selectorLabels" -}}
app.kubernetes.io/name: {{ include "genserve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "genserve.labels" -}}
{{ include "genserve.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "genserve.metadata" -}}
name: {{ include "genserve.fullname" . }}
labels:
  {{- include "genserve.labels" . | nindent 2 }}
{{- end }}

{{- define "genserve.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "genserve.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "genserve.image" -}}
{{- $suffix := ternary "-gpu" "" (gt (int .Values.gpu.count) 0) }}
{{- $tag := default (printf "%s%s" .Chart.AppVersion $suffix) .Values.image.tag }}
{{- printf "%s:%s" .Values.image.repository $tag }}
{{- end }}

{{- define "genserve.probe" -}}
httpGet: {path: {{ .path }}, port: http{{ if .root.Values.tls.secretName }}, scheme: HTTPS{{ end }}}
{{- end }}

{{- define "genserve.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* The flags of `genserve serve` that follow from the values. */}}
{{- define "genserve.args" -}}
- serve
{{- range .Values.loadModels }}
- {{ . | quote }}
{{- end }}
- --model-repository=/models
- --host=0.0.0.0
- --exit-timeout-secs={{ .Values.drain.exitTimeoutSeconds }}
{{- if not .Values.metrics.requireKey }}
- --allow-unauthenticated-metrics
{{- end }}
{{- if .Values.auth.allowUnauthenticated }}
- --allow-unauthenticated
{{- $service := printf "%s.%s" (include "genserve.fullname" .) .Release.Namespace }}
{{- range concat (list $service (printf "%s.svc" $service) (printf "%s.svc.cluster.local" $service)) .Values.allowedHosts }}
- {{ printf "--allowed-host=%s" . | quote }}
{{- end }}
{{- else if .Values.auth.keyFile }}
- --api-key-file=/keys/{{ .Values.auth.keyFile }}
{{- end }}
{{- if .Values.tls.secretName }}
- --ssl-certfile=/tls/tls.crt
- --ssl-keyfile=/tls/tls.key
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- define "genserve.keyVariables" -}}
{{- $secret := .Values.auth.secretName }}
{{- range $variable, $key := dict "GENSERVE_API_KEY" .Values.auth.apiKey "GENSERVE_CONTROL_KEY" .Values.auth.controlKey }}
{{- if $key }}
- name: {{ $variable }}
  valueFrom:
    secretKeyRef:
      name: {{ $secret }}
      key: {{ $key }}
{{- end }}
{{- end }}
{{- end }}
