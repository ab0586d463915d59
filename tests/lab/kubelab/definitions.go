package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/install"
	v1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	rules "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/validation"
	structural "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/defaulting"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/objectmeta"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/schema/pruning"
	"k8s.io/apiextensions-apiserver/pkg/apiserver/validation"
	"k8s.io/apiextensions-apiserver/pkg/crdserverscheme"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"sigs.k8s.io/yaml"
)

// question is an object that somebody creates; or, with Old, what it shall be after an update, of
// its status alone where Status is set.
type question struct {
	Object map[string]any `json:"object"`
	Old    map[string]any `json:"old"`
	Status bool           `json:"status"`
}

// answer is the object as it would be stored, or why the API server would refuse it.
type answer struct {
	Object map[string]any `json:"object"`
	Errors []string       `json:"errors"`
}

// definition is a CustomResourceDefinition's version as the API server serves it.
type definition struct {
	schema         *structural.Structural
	create         rest.RESTCreateStrategy
	update, status rest.RESTUpdateStrategy
}

// newDefinitionsCommand answers, for each line of JSON that it reads, what an API server with
// these CustomResourceDefinitions would: the code is the server's own (unknown fields, defaults,
// schema, lists, CEL), without the server.
func newDefinitionsCommand() *cobra.Command {
	return &cobra.Command{
		Use:           "definitions FILE...",
		SilenceUsage:  true,
		SilenceErrors: false,
		RunE: func(_ *cobra.Command, files []string) error {
			served := map[schema.GroupVersionKind]definition{}
			for _, file := range files {
				if err := load(file, served); err != nil {
					return fmt.Errorf("%s: %w", file, err)
				}
			}
			return serve(served)
		},
	}
}

func serve(served map[schema.GroupVersionKind]definition) error {
	input, output := bufio.NewScanner(os.Stdin), json.NewEncoder(os.Stdout)
	input.Buffer(nil, 1<<24)
	for input.Scan() {
		var asked question
		if err := asked.read(input.Bytes()); err != nil {
			return err
		}
		object := &unstructured.Unstructured{Object: asked.Object}
		found, ok := served[object.GroupVersionKind()]
		if !ok {
			return fmt.Errorf("no definition of %s is given", object.GroupVersionKind())
		}
		if err := output.Encode(found.judge(asked)); err != nil {
			return err
		}
	}
	return input.Err()
}

// read decodes as the API server does: whole numbers stay whole.
func (asked *question) read(line []byte) error {
	var raw struct {
		Object, Old json.RawMessage
		Status      bool
	}
	if err := json.Unmarshal(line, &raw); err != nil {
		return err
	}
	asked.Status = raw.Status
	for _, part := range []struct {
		from json.RawMessage
		to   *map[string]any
	}{{raw.Object, &asked.Object}, {raw.Old, &asked.Old}} {
		if len(part.from) == 0 || string(part.from) == "null" {
			continue
		}
		object := unstructured.Unstructured{}
		if err := object.UnmarshalJSON(part.from); err != nil {
			return err
		}
		*part.to = object.Object
	}
	return nil
}

func (d definition) judge(asked question) answer {
	object := &unstructured.Unstructured{Object: asked.Object}
	unknown, err := d.coerce(object)
	if err != nil {
		return answer{Errors: []string{err.Error()}}
	}
	if len(unknown) > 0 {
		return answer{Errors: unknown}
	}
	ctx := context.Background()
	var found field.ErrorList
	if asked.Old == nil {
		d.create.PrepareForCreate(ctx, object)
		found = d.create.Validate(ctx, object)
	} else {
		old, strategy := &unstructured.Unstructured{Object: asked.Old}, d.update
		if asked.Status {
			strategy = d.status
		}
		if object.GetResourceVersion() == "" {
			object.SetResourceVersion("1") // an update without one is a matter of the store
		}
		if old.GetResourceVersion() == "" {
			old.SetResourceVersion("1")
		}
		if _, err := d.coerce(old); err != nil {
			return answer{Errors: []string{err.Error()}}
		}
		strategy.PrepareForUpdate(ctx, object, old)
		found = strategy.ValidateUpdate(ctx, object, old)
	}
	if len(found) == 0 {
		return answer{Object: object.Object, Errors: []string{}}
	}
	refused := answer{}
	for _, one := range found {
		refused.Errors = append(refused.Errors, one.Error())
	}
	return refused
}

// coerce does what the server's decoder does: defaults, then unknown fields, nulls and metadata.
func (d definition) coerce(object *unstructured.Unstructured) (unknown []string, err error) {
	defaulting.Default(object.Object, d.schema)
	kind, version := object.GetKind(), object.GetAPIVersion()
	meta, _, fields, err := objectmeta.GetObjectMetaWithOptions(
		object.Object, objectmeta.ObjectMetaOptions{ReturnUnknownFieldPaths: true})
	if err != nil {
		return nil, err
	}
	fields = append(fields, pruning.PruneWithOptions(object.Object, d.schema, true,
		structural.UnknownFieldPathOptions{TrackUnknownFieldPaths: true})...)
	defaulting.PruneNonNullableNullsWithoutDefaults(object.Object, d.schema)
	wrong, paths := objectmeta.CoerceWithOptions(nil, object.Object, d.schema, false,
		objectmeta.CoerceOptions{ReturnUnknownFieldPaths: true})
	if wrong != nil {
		return nil, wrong
	}
	object.SetKind(kind)
	object.SetAPIVersion(version)
	if err := objectmeta.SetObjectMeta(object.Object, meta); err != nil {
		return nil, err
	}
	for _, name := range append(fields, paths...) {
		unknown = append(unknown, fmt.Sprintf("unknown field %q", name))
	}
	return unknown, nil
}

func load(file string, served map[schema.GroupVersionKind]definition) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	install.Install(scheme)
	var external v1.CustomResourceDefinition
	if err := yaml.UnmarshalStrict(text, &external); err != nil {
		return err
	}
	scheme.Default(&external)
	var crd apiextensions.CustomResourceDefinition
	if err := scheme.Convert(&external, &crd, nil); err != nil {
		return err
	}
	// Of a definition without a status the server fills in what it stores first.
	crd.Status.StoredVersions = []string{external.Spec.Versions[0].Name}
	if found := rules.ValidateCustomResourceDefinition(context.Background(), &crd); len(found) > 0 {
		return found.ToAggregate()
	}
	for i := range external.Spec.Versions {
		kind := schema.GroupVersionKind{
			Group: crd.Spec.Group, Version: crd.Spec.Versions[i].Name, Kind: crd.Spec.Names.Kind}
		if served[kind], err = newDefinition(scheme, &external, kind, i); err != nil {
			return err
		}
	}
	return nil
}

func newDefinition(
	scheme *runtime.Scheme, crd *v1.CustomResourceDefinition, kind schema.GroupVersionKind, i int,
) (definition, error) {
	version := crd.Spec.Versions[i]
	var props apiextensions.CustomResourceValidation
	if err := scheme.Convert(version.Schema, &props, nil); err != nil {
		return definition{}, err
	}
	made, err := structural.NewStructural(props.OpenAPIV3Schema)
	if err != nil {
		return definition{}, err
	}
	validator, _, err := validation.NewSchemaValidator(props.OpenAPIV3Schema)
	if err != nil {
		return definition{}, err
	}
	var ofStatus validation.SchemaValidator
	if part, ok := props.OpenAPIV3Schema.Properties["status"]; ok {
		if ofStatus, _, err = validation.NewSchemaValidator(&part); err != nil {
			return definition{}, err
		}
	}
	var subresources apiextensions.CustomResourceSubresources
	if version.Subresources != nil {
		if err := scheme.Convert(version.Subresources, &subresources, nil); err != nil {
			return definition{}, err
		}
	}
	strategy := customresource.NewStrategy(
		crdserverscheme.NewUnstructuredObjectTyper(), crd.Spec.Scope == v1.NamespaceScoped, kind,
		validator, ofStatus, made, subresources.Status, subresources.Scale, nil)
	status := customresource.NewStatusStrategy(strategy)
	if made == nil {
		return definition{}, errors.New("a version has no schema")
	}
	return definition{schema: made, create: strategy, update: strategy, status: status}, nil
}
