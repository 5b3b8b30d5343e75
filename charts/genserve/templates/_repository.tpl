{{/* The init containers that bring the model repository to /mnt/repository; none where it is a volume already. */}}
{{- define "genserve.initContainers" -}}
{{- $repository := .Values.repository }}
{{- if eq $repository.source "pull" }}
{{- range $index, $model := $repository.pull.models }}
- name: pull-{{ $index }}
  image: {{ include "genserve.image" $ }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  args:
    - pull
    - {{ $model | quote }}
    - --model-repository=/mnt/repository
    {{- with $repository.pull.precision }}
    - --precision={{ . }}
    {{- end }}
  {{- include "genserve.initContainer" $ | nindent 2 }}
{{- end }}
{{- else if eq $repository.source "image" }}
- name: copy
  image: {{ required "repository.image.reference names the image with the models" $repository.image.reference | quote }}
  command: [cp, -R, {{ printf "%s/." (trimSuffix "/" $repository.image.path) | quote }}, /mnt/repository/]
  {{- include "genserve.initContainer" . | nindent 2 }}
{{- else if eq $repository.source "git" }}
- name: clone
  image: {{ $repository.git.image | quote }}
  command:
    - sh
    - -ec
    - git clone --depth=1 --branch "$1" "$2" /tmp/clone && cp -R "/tmp/clone/$3/." /mnt/repository/
    - sh
    - {{ $repository.git.revision | quote }}
    - {{ required "repository.git.url names the git repository" $repository.git.url | quote }}
    - {{ $repository.git.path | quote }}
  {{- include "genserve.initContainer" . | nindent 2 }}
{{- else if eq $repository.source "s3" }}
- name: copy
  image: {{ $repository.s3.image | quote }}
  command:
    - aws
    - s3
    - cp
    - --recursive
    - --no-progress
    {{- with $repository.s3.endpoint }}
    - --endpoint-url={{ . }}
    {{- end }}
    - {{ required "repository.s3.uri names the bucket: s3://BUCKET/PREFIX" $repository.s3.uri | quote }}
    - /mnt/repository
  {{- include "genserve.initContainer" . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "genserve.initContainer" -}}
env:
  - {name: HOME, value: /tmp}
  {{- with .Values.repository.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.repository.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- include "genserve.securityContext" . | nindent 2 }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
volumeMounts:
  - {name: models, mountPath: /mnt/repository}    # /models may be a folder of the image that is copied
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "genserve.modelsVolume" -}}
{{- $repository := .Values.repository }}
name: models
{{- if eq $repository.source "claim" }}
persistentVolumeClaim:
  claimName: {{ required "repository.claim.name names the PersistentVolumeClaim with the models" $repository.claim.name }}
  readOnly: true
{{- else if eq $repository.source "volume" }}
{{- if not $repository.volume }}
{{- fail "repository.volume has the volume with the models" }}
{{- end }}
{{- toYaml $repository.volume | nindent 0 }}
{{- else }}
emptyDir:
  sizeLimit: {{ $repository.sizeLimit }}
{{- end }}
{{- end }}
