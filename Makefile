# Everything a developer or a first user needs. The environment is .venv: `run` and `demo` install what a user needs, the
# others add the developers' tools (deploy/environment.sh). It is brought up to date when a lock file changes.

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
LOCK := deploy/locks/dev.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet
UV := build/uv/bin/uv
RESOLVE := --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
COMPILE := $(UV) pip compile pyproject.toml $(RESOLVE)
# Images run the versions that the tests ran.
COMPILE_ROLE := $(COMPILE) --constraint $(LOCK)
COMPILE_GROUP := $(UV) pip compile $(RESOLVE) --group
ENVIRONMENT := PYTHON="$(PYTHON)" sh deploy/environment.sh
ARGS ?=
MINUTES ?= 10
# Files at a time: tests wait for processes as much as they compute, so two cores have work for four.
JOBS ?= $(shell cores=$$(nproc 2>/dev/null || echo 4); echo $$(( cores < 4 ? 4 : cores > 16 ? 16 : cores )))
# In the order of the folders, which ends with the short files: sorted by the number of tests, the long ones come last.
PARALLEL := --numprocesses $(JOBS) --dist loadfile --no-loadscope-reorder
# What `make test` runs, a file or folder each line: most that start no installation, and some others for each part.
ESSENTIAL := tests/essential.txt
LIVE := $(wildcard tests/integration/test_*.py tests/faults/test_*.py tests/plugins/*/live/test_*.py tests/plugins/*/e2e/test_*.py)
COVERAGE := build/coverage
FLOORS := build/floors
# Left out: the models of the onnx package and the document that FastAPI writes, which differ between versions.
FLOORS_TESTS := tests/unit tests/integration/test_tritonclient.py \
    --ignore tests/plugins/proof/unit/test_independence_corpus.py --ignore tests/unit/test_openapi_document.py
FUZZ_LOCK := deploy/locks/fuzz.txt
CLIENTS_LOCK := deploy/locks/clients.txt
AUDIT_LOCK := deploy/locks/audit.txt

# Where this is set, every process that starts compiles a thousand modules anew: half a second of CPU for a gateway.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: run test test-all test-quick test-frameworks test-tools install serving check dashboards pictures console openapi coverage bench bench-race plan-study autoscale-study demo soak explore fuzz lock floors audit sbom wheel clean help
.DELETE_ON_ERROR:

run: serving ## start everything here, the digits example loaded (ARGS="--http-port 9000")
	@$(BIN)/millstream up $(ARGS)

demo: serving ## send held-out digits to a running Millstream: accuracy, rate, latency
	@$(BIN)/millstream demo $(ARGS)

test: install $(VENV)/.clients ## run the tests of each part, in ten minutes on two cores; or some (ARGS="tests/unit -x")
	@$(BIN)/python -m tests.kit.tools
	@$(BIN)/python -m pytest $(or $(ARGS),$(PARALLEL) @$(ESSENTIAL))
	@$(if $(ARGS),,echo "make test-all also runs the other $(words $(filter-out $(shell sed 's/::.*//' $(ESSENTIAL)),$(LIVE))) files of $(words $(LIVE)) that start installations, and the long ones of the others")

test-all: install $(VENV)/.clients $(VENV)/.audit ## run all tests but those of make test-frameworks, JOBS files at a time
	@$(BIN)/python -m tests.kit.tools
	@$(BIN)/python -m pytest $(PARALLEL)

test-quick: install ## run the tests that start no installation: minutes
	@$(BIN)/python -m pytest $(PARALLEL) tests/fuzz tests/contract tests/property tests/unit $(wildcard tests/plugins/*/unit)

test-frameworks: $(VENV)/.frameworks ## run the tests of other frameworks, in an environment of their own (ARGS="-k keras")
	@if [ -d $(VENV)/frameworks ]; then PYTHONPATH=$(CURDIR)/src:$(CURDIR) $(VENV)/frameworks/bin/python -m pytest \
	    -p no:cacheprovider --numprocesses 2 --dist loadfile tests/frameworks $(ARGS); fi

test-tools: install ## install the Debian packages that some tests need, with sudo unless run as root
	@$(BIN)/python -m tests.kit.tools install

check: install ## lint, format, types, rules between folders
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.kit.line_budget
	@$(BIN)/python -m tests.kit.face

dashboards: install ## write deploy/grafana/dashboards, the dashboards as Grafana reads them
	@$(BIN)/python -m deploy.grafana.build

console: ## build plugins/console/static, the web application that is served, from plugins/console/web (needs Node 18)
	@cd plugins/console/web && npm ci --no-audit --no-fund --silent && npm run build

pictures: $(VENV)/.frameworks ## write the pictures of docs: a terminal, and the pages of the console
	@$(BIN)/python -m tests.kit.console_pictures
	@PYTHONPATH=$(CURDIR)/src:$(CURDIR) $(VENV)/frameworks/bin/python -m tests.kit.first_picture

openapi: install ## write docs/openapi.json, the description of the HTTP API, and what the Python client has of it
	@$(BIN)/python -m tests.kit.openapi
	@$(BIN)/python -m tests.kit.generated_client

coverage: install $(VENV)/.clients $(VENV)/.audit ## run the tests and report which lines they ran, in all processes (ARGS="tests/unit")
	@rm -rf $(COVERAGE) && mkdir -p $(COVERAGE)
	@status=0; \
	$(BIN)/python -m coverage run -m pytest $(or $(ARGS),$(PARALLEL)) || status=$$?; \
	$(BIN)/python -m coverage combine --quiet && $(BIN)/python -m coverage html --quiet \
	    && $(BIN)/python -m coverage report && echo "each line: $(COVERAGE)/html/index.html"; \
	exit $$status

bench: install ## measure throughput and latency as ratios to a bare server
	@$(BIN)/python -m tests.bench $(ARGS)

# NNCF and MiniLM are in the environment of the frameworks; where that cannot be made, the race does without them.
bench-race: $(VENV)/.frameworks ## race compiled forms of real architectures, and write the table of docs/compilers.md (ARGS="--quick")
	@python=$(VENV)/frameworks/bin/python; [ -x $$python ] || python=$(BIN)/python; \
	    PYTHONPATH=$(CURDIR)/src:$(CURDIR) $$python -m tests.bench.race --write $(ARGS)

plan-study: install ## simulate 200 workers and 5,000 models, and write the table and plot of docs/multi-model.md
	@$(BIN)/python -m tests.bench.placement_study $(ARGS)

autoscale-study: install ## simulate a day of traffic against other autoscalers' rules, and print the table
	@$(BIN)/python -m tests.bench.autoscaling $(ARGS)

soak: install ## load with faults of all kinds and hostile models (MINUTES=10)
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) $(ARGS)

explore: install ## run the state machines with random seeds (MINUTES=10), or one of them again (SEED=123)
	@$(BIN)/python -m tests.explore --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: install $(VENV)/.fuzz ## feed the request parsers with malformed input (MINUTES=10)
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) $(ARGS)

install: ## make the environment with the developers' tools, nothing else
	@$(ENVIRONMENT) dev

serving: ## make the environment as a user needs it, nothing else
	@$(ENVIRONMENT) serving

lock: $(UV) ## resolve the dependencies again, into deploy/locks
	$(COMPILE) --extra all --extra openvino --extra triton --group dev --quiet --output-file $(LOCK)
	$(COMPILE_ROLE) --extra gateway --extra embeddings --extra media --extra tracing --extra cpu --quiet --output-file deploy/locks/gateway.txt
	$(COMPILE_ROLE) --extra worker --extra cpu --quiet --output-file deploy/locks/worker-cpu.txt
	$(COMPILE_ROLE) --extra worker --extra gpu --quiet --output-file deploy/locks/worker-gpu.txt
	$(COMPILE_ROLE) --extra all --quiet --output-file deploy/locks/serving.txt
	$(COMPILE_GROUP) build --constraint $(LOCK) --quiet --output-file deploy/locks/build.txt
	$(COMPILE_GROUP) clients --quiet --output-file $(CLIENTS_LOCK)
	$(COMPILE_GROUP) audit --quiet --output-file $(AUDIT_LOCK)
	$(COMPILE_GROUP) fuzz --quiet --output-file $(FUZZ_LOCK)
	@for python in 3.11 3.14; do $(UV) pip install --dry-run --quiet --target build/none --python-version $$python \
	    --only-binary :all: --require-hashes -r $(LOCK) || { echo "Python $$python lacks wheels" >&2; exit 1; }; done

arm64: $(UV) ## check that the locked packages of every role have wheels for 64-bit Arm
	@for role in gateway worker-cpu worker-gpu serving; do $(UV) pip install --dry-run --quiet --target build/none \
	    --python-version 3.11 --python-platform aarch64-manylinux_2_35 --only-binary :all: --require-hashes \
	    -r deploy/locks/$$role.txt || { echo "$$role lacks wheels for 64-bit Arm" >&2; exit 1; }; done
	@$(UV) pip compile pyproject.toml --extra worker --extra cpu --extra openvino --extra triton --constraint $(LOCK) \
	    --python-version 3.11 --python-platform aarch64-manylinux_2_35 --only-binary :all: --quiet >build/arm64.txt

floors: $(UV) ## test the lowest versions that pyproject allows (ARGS="tests/unit"), in build/floors
	@rm -rf $(FLOORS) && $(UV) venv --quiet --python $(BIN)/python $(FLOORS)
	@$(UV) pip compile pyproject.toml --extra all --resolution lowest-direct --only-binary :all: \
	    --python $(FLOORS)/bin/python --no-header --no-annotate --quiet --output-file $(FLOORS)/lowest.txt
	@$(UV) pip install --quiet --python $(FLOORS)/bin/python --only-binary :all: \
	    --requirement $(FLOORS)/lowest.txt --constraint $(FLOORS)/lowest.txt --group dev
	@$(UV) pip install --quiet --python $(FLOORS)/bin/python --no-deps --no-build-isolation --editable .
	@$(FLOORS)/bin/python -m pytest $(or $(ARGS),$(FLOORS_TESTS) $(PARALLEL))

audit: $(VENV)/.audit ## look for known vulnerabilities in the packages of each role (needs pypi.org)
	@$(VENV)/audit/bin/python deploy/supply_chain.py audit

sbom: $(VENV)/.audit ## write the components of each role to build/sbom (CycloneDX JSON)
	@$(VENV)/audit/bin/python deploy/supply_chain.py sbom

wheel: install ## build dist/millstream-*.whl
	@$(BIN)/python -m hatchling build --target wheel

clean: ## remove the environment and all caches, not your models
	@rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## show this
	@echo "Millstream: make TARGET"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# Large, and for Linux on x86-64 alone: elsewhere nothing is installed, and Hypothesis does its work.
$(VENV)/.fuzz: $(FUZZ_LOCK) | install
	@$(PIP) install --require-hashes --only-binary :all: -r $(FUZZ_LOCK)
	@touch $@

# Clients that cannot share the project's environment; the tests start them as programs.
$(VENV)/.clients: $(CLIENTS_LOCK) | install
	@$(BIN)/python -m venv --clear $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip --disable-pip-version-check --no-input --quiet install --require-hashes --only-binary :all: -r $(CLIENTS_LOCK)
	@touch $@

# Every framework whose models are imported, and every compiler: gigabytes, for `make test-frameworks` alone.
$(VENV)/.frameworks: tests/frameworks/requirements.txt | install
	@$(BIN)/python -m tests.kit.framework_environment $(VENV)/frameworks || [ $$? -eq 3 ]
	@touch $@

# Programs that look at the locks, for a release and a test.
$(VENV)/.audit: $(AUDIT_LOCK) | install
	@$(BIN)/python -m venv --clear $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip --disable-pip-version-check --no-input --quiet install --require-hashes --only-binary :all: -r $(AUDIT_LOCK)
	@touch $@

$(UV): | install
	@$(BIN)/python -m venv build/uv && build/uv/bin/python -m pip --disable-pip-version-check --no-input --quiet install uv
