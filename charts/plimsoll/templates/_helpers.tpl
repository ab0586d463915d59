{{- define "plimsoll.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "plimsoll.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "plimsoll.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name must name an existing ServiceAccount when serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "plimsoll.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "plimsoll.labels" -}}
{{ include "plimsoll.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* The labels with more of them, of which none replaces the chart's own:
include "plimsoll.labelsWith" (list . .Values.podLabels). */}}
{{- define "plimsoll.labelsWith" -}}
{{- $own := include "plimsoll.labels" (index . 0) | fromYaml -}}
{{- toYaml (merge $own (default dict (index . 1))) -}}
{{- end -}}

{{/* The image of a part: include "plimsoll.image" (list . "operator"). */}}
{{- define "plimsoll.image" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- with $root.Values.images -}}
{{- $name := printf "%s-%s" .prefix $part -}}
{{- if .registry }}{{ trimSuffix "/" .registry }}/{{ end }}{{ $name }}
{{- with index .digests $part }}@{{ . }}{{ else }}:{{ default $root.Chart.AppVersion .tag }}{{ end -}}
{{- end -}}
{{- end -}}

{{- define "plimsoll.restricted" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end -}}

{{/* The image names its user, 10001. OpenShift assigns another, and refuses pods that name one. */}}
{{- define "plimsoll.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Other releases whose operator may do its work in a namespace of this one, by their roles. A
release that watches all namespaces has a ClusterRole; whoever may not create one may not list
them either, so that is only looked for with the cluster's objects. */}}
{{- define "plimsoll.overlap" -}}
{{- $others := list -}}
{{- $found := list -}}
{{- if .Values.namespaces -}}
{{- range .Values.namespaces -}}
{{- $found = concat $found (dig "items" list (lookup "rbac.authorization.k8s.io/v1" "Role" . "")) -}}
{{- end -}}
{{- else -}}
{{- $found = dig "items" list (lookup "rbac.authorization.k8s.io/v1" "Role" "" "") -}}
{{- end -}}
{{- if or (not .Values.namespaces) (ne .Values.clusterObjects "Exclude") -}}
{{- $found = concat $found (dig "items" list (lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "")) -}}
{{- end -}}
{{- range $found -}}
{{- $labels := default dict .metadata.labels -}}
{{- $notes := default dict .metadata.annotations -}}
{{- $ours := eq (get $labels "app.kubernetes.io/name") $.Chart.Name -}}
{{- $watches := eq (get $labels "plimsoll.dev/operator-rights") "true" -}}
{{- $name := get $notes "meta.helm.sh/release-name" -}}
{{- $namespace := get $notes "meta.helm.sh/release-namespace" -}}
{{- $same := and (eq $name $.Release.Name) (eq $namespace $.Release.Namespace) -}}
{{- if and $ours $watches (not $same) -}}
{{- $others = append $others (printf "release %s of namespace %s" $name $namespace) -}}
{{- end -}}
{{- end -}}
{{- join ", " ($others | uniq) -}}
{{- end -}}
