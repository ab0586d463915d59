# Each target does all of its own set-up; the first one on a fresh machine takes minutes,
# because PyTorch brings its accelerator libraries along.
#
#   make demo       a leak, its incident and its cure on this machine: CPU, no cluster
#   make test       every test that this machine can run
#   make test-engines  real vLLM and SGLang under the supervisor (writes docs/conformance.md), and
#                   our engine on published tokenizers, chat templates and a published model, which
#                   published clients ask
#   make check      format, lint, types, import direction, generated files, prose (needs Go, once)
#   make docs       the documents as a site in site/: SITE=...
#   make docs-check links, commands, manifests, tables, dashboards and alerts of the documents
#   make release-check  all of that, Helm's lint, kubeconform, and axe on our pages (needs Go)
#   make images     the images, with docker, podman or buildah: REGISTRY=... TAG=... [PUSH=1]
#   make release    the files of a release in dist/: VERSION=... [ARCHIVES="operator supervisor"]
#                   (needs helm and kubectl; for archives of images also a builder)
#   make cluster    a real one-node Kubernetes for a person (root, Debian)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/pytest
# The tests start hundreds of Python processes: each would compile torch and its friends again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test durations test-unit test-long test-next test-lowest engines test-engines test-gpu images release check audit docs docs-check release-check tour format generate lock lab cluster cluster-down clean

help:
	@sed -n 's/^#   //p' $(MAKEFILE_LIST)

$(READY): requirements/dev.txt pyproject.toml faults/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python >= 3.11 is needed; name one with: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo 'setup: create $(VENV) and install the locked packages (PyTorch is 3 GB; some 3 minutes) ...'
	@$(PYTHON) -m venv $(VENV) || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'
	$(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode --require-hashes -r requirements/dev.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable . --editable ./faults
	@touch $@
	@echo 'setup: done'

setup: $(READY)

demo: $(READY)
	$(BIN)/plimsoll demo --out demo-report

# The node tier needs root and Debian's containerd, runc and CNI plugins; the cluster tier needs
# go, or KUBEBUILDER_ASSETS. `lab` installs and builds what is absent, once.
lab: $(READY)
	$(BIN)/python -m tests.lab setup

# Five workers on two cores: tests of labs and engines wait for more than half of their time.
test: $(READY) lab
	$(PYTEST) -n 5 --dist loadscope --no-loadscope-reorder --durations-file=durations.json -m 'not long'

# What the last `make test` cost against the record of tests/durations.json.
durations: $(READY)
	@$(BIN)/python -m tests.durations diff

test-unit: $(READY)
	$(PYTEST) tests/unit

test-long: $(READY) lab
	$(PYTEST) -m long --timeout 3600
	TRITON_INTERPRET=1 $(PYTEST) -m long --timeout 3600 tests/unit/engine/kernels

# The CPU tests on the newest stack (requirements/stack-next.in), in an environment of its own.
NEXT := .venv-next
test-next: $(READY)
	$(PYTHON) -m venv $(NEXT)
	$(BIN)/uv pip install --quiet --python $(NEXT)/bin/python --require-hashes -r requirements/dev.txt
	$(BIN)/uv pip install --quiet --python $(NEXT)/bin/python --compile-bytecode --require-hashes -r requirements/stack-next.txt
	$(BIN)/uv pip install --quiet --python $(NEXT)/bin/python --no-deps --editable . --editable ./faults
	$(NEXT)/bin/pytest -n 3 --dist loadscope -m 'not long' tests/unit tests/integration/engine

# The same tests on the lowest versions that pyproject.toml admits.
LOWEST := .venv-lowest
test-lowest: $(READY)
	$(PYTHON) -m venv $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --require-hashes -r requirements/dev.txt
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --upgrade --resolution lowest-direct \
	  --editable '.[cli,download,engine,operator,sidecar]'
	$(BIN)/uv pip install --quiet --python $(LOWEST)/bin/python --no-deps --editable ./faults
	$(LOWEST)/bin/pytest -n 3 --dist loadscope -m 'not long' tests/unit tests/integration/engine

# Real vLLM and SGLang without a GPU: some 15 GB below PLIMSOLL_ENGINES (~/.cache/plimsoll-engines).
# Their Python is 3.12; PLIMSOLL_ENGINES_PYTHON names another interpreter.
engines: $(READY)
	$(BIN)/python -m tests.conformance.setup

test-engines: engines
	$(PYTEST) tests/conformance -x

test-gpu: $(READY)
	$(PYTEST) tests/gpu

# PLATFORMS=linux/amd64,linux/arm64 builds for both; the engine's packages exist for amd64 alone.
# BUILD_FLAGS go to the builder as they are.
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGES ?= operator supervisor engine
REGISTRY ?=
TAG ?= $(VERSION)
BUILDER ?= $(notdir $(firstword $(wildcard $(foreach tool,docker podman buildah,$(addsuffix /$(tool),$(subst :, ,$(PATH)))))))
name = $(if $(REGISTRY),$(REGISTRY:/=)/)plimsoll-$(1):$(TAG)
several = $(if $(PLATFORMS),--platform=$(PLATFORMS))
ifeq ($(BUILDER),docker)
build = docker buildx build $(several) $(if $(PUSH),--push,--load) --tag=$(call name,$(1)) \
	--target=$(1) $(BUILD_FLAGS) .
else
build = $(BUILDER) build $(several) $(if $(PLATFORMS),--manifest,--tag)=$(call name,$(1)) \
	--target=$(1) $(BUILD_FLAGS) .$(if $(PUSH), && $(BUILDER) $(if $(PLATFORMS),manifest push --all,push) \
	$(call name,$(1)) docker://$(call name,$(1)))
endif
images: $(addprefix image-,$(IMAGES))
image-%:
	@test -n "$(BUILDER)" || { echo "images: install docker, podman or buildah"; exit 1; }
	$(call build,$*)

ARCHIVES ?=
DOWNLOADS ?=
release: $(READY) $(addprefix image-,$(ARCHIVES))
	$(BIN)/python requirements/release.py $(VERSION) $(foreach part,$(ARCHIVES),$(call name,$(part))) \
	  --builder="$(BUILDER)" $(if $(DOWNLOADS),--downloads=$(DOWNLOADS))

ACTIONLINT := go run github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python requirements/declared.py
	$(BIN)/python -m plimsoll_api.generate --check
	$(BIN)/python -m docs.generate --check
	$(BIN)/python -m dashboards.generate --check
	$(BIN)/python charts/generate.py --check
	$(BIN)/python -m docs.prose
	$(BIN)/zizmor --offline --quiet .github/workflows
	$(BIN)/hadolint Dockerfile
	@if command -v go > /dev/null; then $(ACTIONLINT); else echo 'actionlint: skipped: needs Go'; fi

# Known vulnerabilities of the locked versions. Needs PyPI itself: a mirror has no database of them.
audit: $(READY)
	$(BIN)/python requirements/audit.py

docs-check: $(READY) lab
	$(BIN)/python -m docs.check

release-check: check docs-check
	$(BIN)/python -m charts.check
	$(PYTEST) -m 'long or not long' tests/integration/test_docs_site.py tests/integration/test_page_browser.py

# The documents as a site, in SITE, with packages of its own.
SITE ?= site
SITE_VENV := .venv-docs
docs: $(READY)
	$(BIN)/uv venv --quiet --allow-existing $(SITE_VENV)
	$(BIN)/uv pip install --quiet --python $(SITE_VENV)/bin/python --require-hashes -r requirements/docs.txt
	NO_MKDOCS_2_WARNING=1 $(SITE_VENV)/bin/mkdocs build --quiet --site-dir $(abspath $(SITE))

# A leak, recorded and told by the command line, the dashboards and the page: docs/tour.md.
tour: $(READY) lab
	$(BIN)/python -m docs.tour

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

generate: $(READY)
	$(BIN)/python -m plimsoll_api.generate
	$(BIN)/python -m docs.generate
	$(BIN)/python -m dashboards.generate
	$(BIN)/python charts/generate.py

# The lock names no registry host, so that a mirror can serve it.
LOCK := $(BIN)/uv pip compile --quiet --no-emit-index-url --universal --python-version 3.11 \
	--generate-hashes --custom-compile-command 'make lock'
PROJECT := $(LOCK) pyproject.toml -c requirements/dev.txt
lock: $(READY)
	$(LOCK) pyproject.toml --all-extras -c requirements/stack.in -o requirements/dev.txt
	$(PROJECT) --extra operator -o requirements/operator.txt
	$(PROJECT) --extra sidecar --extra download -o requirements/sidecar.txt
	$(PROJECT) --extra engine -o requirements/engine.txt
	$(LOCK) requirements/stack-next.in -o requirements/stack-next.txt
	$(LOCK) requirements/docs.in -o requirements/docs.txt
	$(LOCK) requirements/build.in -o requirements/build.txt

cluster: $(READY) lab
	$(BIN)/python -m tests.lab up

cluster-down: $(READY)
	$(BIN)/python -m tests.lab down

clean:
	rm -rf $(VENV) $(NEXT) $(SITE_VENV) site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis demo-report fuzz-findings
