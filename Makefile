RUNTIME ?= cpu
MODEL ?= smollm2
REPOSITORY ?= model_repository
PYTHON ?= python3

# The processes of a test or a benchmark import the same modules, which the first of them compiles.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
CORE := $(VENV)/.core-$(RUNTIME)
DEV := $(VENV)/.dev-$(RUNTIME)
DOCS := $(VENV)/.docs
RELEASE := $(VENV)/.release
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/pip install

.PHONY: help setup pull serve chat test test-extended check soak docs bench conformance dist sbom image page manifests

help:
	@echo "make serve   set up, bring the default model, start the server"
	@echo "make chat    the same, and chat in the terminal instead"
	@echo "make test    set up and run the tests; ARGS='-m slow' runs the slow ones"
	@echo "make test-extended  the tests that only CI runs each time, with 100 examples of each property instead of 15"
	@echo "make soak    100,000 seeds of the simulation; SEEDS=5000 runs fewer"
	@echo "make check   ruff, mypy, import layers, known vulnerabilities"
	@echo "make docs    the documentation as a site, in site/"
	@echo "make bench   the server compared with the bare forward loop"
	@echo "make conformance   real clients of many libraries, each in an environment of its own, in one table"
	@echo "make page    checks and bundles the chat page and the dashboard; needs npm"
	@echo "make manifests  the plain manifests for Kubernetes, from the Helm chart"
	@echo "make dist    the wheel and the source archive, checked, in dist/; make sbom lists what a wheel installs"
	@echo "make image   a container image; RUNTIME=gpu for one with CUDA"

setup: $(DEV)

# The build of ONNX Runtime for GPUs takes the place of the one for CPUs; an extra cannot remove a package.
ifeq ($(RUNTIME),gpu)
define keep_one_onnxruntime
	$(BIN)/pip uninstall --yes onnxruntime
	$(INSTALL) --force-reinstall --no-deps onnxruntime-gpu
endef
endif

# Not again: an environment that another Python renews is a mixture of both.
CREATE := test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)

# What serving needs. The installation compiles the kernels.
$(CORE): pyproject.toml constraints.txt hatch_build.py genserve/kernels/build.py $(wildcard genserve/kernels/src/*)
	$(CREATE)
	$(INSTALL) -e '.$(if $(filter gpu,$(RUNTIME)),[gpu])'
	$(keep_one_onnxruntime)
	touch $@

# On Linux the default torch includes several gigabytes of CUDA, so a CPU machine installs the build without it,
# separately, so that only torch comes from the other index. genserve is there, so only the extra is installed.
$(DEV): pyproject.toml constraints.txt | $(CORE)
ifeq ($(RUNTIME) $(shell uname),cpu Linux)
	$(BIN)/pip install --no-deps --retries 1 --timeout 20 \
		--index-url https://download.pytorch.org/whl/cpu torch==$(TORCH)+cpu
endif
	$(INSTALL) 'genserve[dev]'
	$(keep_one_onnxruntime)
	touch $@

pull: $(CORE)
	@$(BIN)/genserve pull $(MODEL) --model-repository $(REPOSITORY)

serve: pull
	@$(BIN)/genserve serve --model-repository $(REPOSITORY) $(ARGS)

chat: pull
	@$(BIN)/genserve chat $(MODEL) --model-repository $(REPOSITORY) $(ARGS)

test: $(DEV)
	$(BIN)/python -m pytest $(ARGS)

test-extended: $(DEV)
	$(BIN)/python -m pytest -m '(extended or hypothesis) and not slow' $(ARGS)

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/audit.py

SEEDS ?= 100000

soak: $(DEV)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)
	$(BIN)/python -m pytest -m 'hypothesis and not slow' --hypothesis-profile soak

$(RELEASE): pyproject.toml constraints.txt
	$(CREATE)
	$(INSTALL) build check-wheel-contents cyclonedx-bom twine
	touch $@

$(DOCS): pyproject.toml constraints.txt | $(CORE)
	$(INSTALL) 'genserve[docs]'
	touch $@

# The theme announces its successor with each build.
docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

bench: $(DEV) pull
	$(BIN)/python benchmarks/serving.py --model-repository $(REPOSITORY) --model $(MODEL) $(ARGS)

conformance: $(DEV)
	$(BIN)/python -m conformance $(ARGS)

# What the release workflow publishes.
dist: $(RELEASE)
	rm -rf dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python scripts/check_release.py dist/*

# The dependencies of the core, as installed from the wheel in dist/.
sbom: $(RELEASE)
	$(PYTHON) -m venv --clear $(VENV)/sbom
	PIP_CONSTRAINT=constraints.txt $(VENV)/sbom/bin/pip install --quiet dist/*.whl
	$(BIN)/cyclonedx-py environment $(VENV)/sbom --output-file dist/genserve.cdx.json

image:
	docker build --build-arg RUNTIME=$(RUNTIME) --tag genserve:$(RUNTIME) $(if $(filter cpu,$(RUNTIME)),--tag genserve) .

# Its bundle is committed, so that an installation needs no npm.
page:
	cd web && npm ci && npm run check && npm run build

# The manifests are committed, so that they can be applied without Helm.
manifests: $(DEV)
	$(BIN)/python scripts/render_chart.py
