# Two commands do everything: `make demo` shows the main job, `make test` passes the tests.
# `make help` lists the rest. All of them go through `make setup`, which makes .venv once.

VENV  ?= .venv
BIN   := $(VENV)/bin

# Any Python from 3.11 on: the first one found, or `make setup PYTHON=/path/to/python`.
OLD_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	$$p -c '$(OLD_ENOUGH)' >/dev/null 2>&1 && { echo $$p; break; }; done)

# Where PyTorch comes from, when the default index offers more than the CPU build, e.g.
# `make setup TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"`.
TORCH_ARGS ?=
# One environment for the demo, the tests and CI: the package with these extras. Without an extra
# (`make setup EXTRAS=dev`), the tests that need it are skipped, with a reason.
EXTRAS ?= dev,agents,local
comma := ,
# Set-up installs the locked releases. With LATEST=1, any target installs the newest releases that
# pyproject.toml allows instead; PyTorch stays at its locked release.
LATEST ?=
LOCK := $(if $(LATEST),--upgrade --upgrade-strategy eager,-c constraints.txt)
KIND := $(if $(LATEST),latest,locked)
STAMPS := $(VENV)/.setup-done-
STAMP := $(STAMPS)$(if $(LATEST),latest-)$(subst $(comma),-,$(EXTRAS))
TORCH := $(shell sed -n 's/^\(torch==[^ ;]*\).*/\1/p' constraints.txt)
# pip would compile on one core.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq --no-compile
# What few need compiles itself when it is imported: tests, and models other than those used.
COMPILE := $(BIN)/python -m compileall -q -j 0 -x '/tests?/|/transformers/models/(?!auto)' $(VENV)/lib
# Nothing is built with releases that are not in the lock: the build tools are installed first. uv
# takes a third of pip's time, but knows nothing of pip's settings: where it fails, pip takes over.
WHAT = $(LOCK) --no-build-isolation $(TORCH) $(1)
INSTALL = $(if $(LATEST),,$(BIN)/python -m uv pip install -q --python $(BIN)/python $(WHAT) 2>/dev/null ||) $(PIP) $(WHAT)
BUILD_TOOLS := hatchling hatch-autorun hatch-fancy-pypi-readme hatch-vcs editables

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-agent demo-program gallery agent-programs test check test-change format format-check lint types docs test-all test-long test-agents parity faults soak bench compat trainers clients update lock-check executor clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv with everything in it (once); LATEST=1: not the locked releases

# The example plugins are installed like any third-party package, because tests check that.
PLUGINS := $(wildcard example_plugins/*/pyproject.toml)

$(STAMP): pyproject.toml constraints.txt $(PLUGINS)
	@if [ -z "$(PYTHON)" ] || ! $(PYTHON) -c '$(OLD_ENOUGH)' 2>/dev/null; then \
		echo "This project needs Python 3.11 or newer; $(or $(PYTHON),python3) is missing or older:" \
		     "$$($(or $(PYTHON),python3) --version 2>&1 | head -1)." >&2; \
		echo "Install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; fi
	@$(BIN)/python -c '$(OLD_ENOUGH)' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $(STAMPS)*
	@$(PIP) $(LOCK) pip uv
	@echo "setup 1/2: PyTorch ($$($(BIN)/python --version), in $(VENV))"
	@$(PIP) $(TORCH_ARGS) $(TORCH)
	@echo "setup 2/2: the package, the example plugins and development tools ($(KIND) releases)"
	@$(PIP) $(LOCK) $(BUILD_TOOLS)
	@$(call INSTALL,-e '.[$(EXTRAS)]' $(addprefix -e ,$(patsubst %/,%,$(dir $(PLUGINS)))))
	@$(COMPILE) >/dev/null 2>&1 || true # some packages bring files for other releases of Python
	@touch $@

# The examples' commands run in containers if an engine has this image, else on this machine.
export EXAMPLE_TASKS_IMAGE ?= python:3.12-slim
FETCH_IMAGE := docker image inspect $(EXAMPLE_TASKS_IMAGE) >/dev/null 2>&1 || \
	docker pull -q $(EXAMPLE_TASKS_IMAGE) >/dev/null 2>&1 || true

DEMO_TRAINING := --log-dir out/demo-training
# Samples that the training has not seen: it takes the first 64.
DEMO_EVAL := example_tasks/toy.py@letters -T samples=80 --limit 65-80

demo: $(STAMP) ## export a task, roll out an agent, train a tiny model and evaluate it (offline, no key)
	@echo "\$$ inspect rl export example_tasks/word_problems.py --output out/demo"
	@$(BIN)/inspect rl export example_tasks/word_problems.py --output out/demo --overwrite
	@echo
	@$(FETCH_IMAGE)
	@echo "\$$ inspect rl rollout example_tasks/log_search.py --script example_tasks/scripts/log_search.jsonl"
	@$(BIN)/inspect rl rollout example_tasks/log_search.py --script example_tasks/scripts/log_search.jsonl
	@echo
	@rm -rf out/demo-training
	@echo "\$$ inspect rl train example_tasks/toy.py@letters --local $(DEMO_TRAINING)"
	@$(BIN)/inspect rl train example_tasks/toy.py@letters --local $(DEMO_TRAINING)
	@for model in tinker/out/demo-training@0 tinker/out/demo-training; do \
		echo; echo "\$$ inspect eval $(DEMO_EVAL) --model $$model"; \
		$(BIN)/inspect eval $(DEMO_EVAL) --model $$model \
			--log-dir out/demo-evals --display plain || exit 1; \
	done

demo-agent: $(STAMP) ## teach an untrained tiny model to use a tool (offline, no key)
	$(BIN)/python -W ignore -m example_tasks.train_boxes out/demo-agent

demo-program: $(STAMP) ## train a program of twenty lines that uses OpenAI's API (offline, no key)
	$(BIN)/python -W ignore -m example_tasks.train_diary out/demo-program

# The gallery: letters, boxes, diary, mended (examples/README.md).
RUN ?= letters
gallery: $(STAMP) ## run an example of the gallery, and show its curve beside the expected one (RUN=mended)
	$(BIN)/python -W ignore -m examples $(RUN)

# Tests fetch nothing; tests of missing programs are skipped, with a reason.
agent-programs: $(STAMP) ## fetch the agent programs that tests run (npm and PyPI, 600 MB, once)
	@$(BIN)/python -m tests.agents.programs

# Tests that share an engine run in two workers, those that start servers in another (tests/conftest.py). Most
# of the time of a test is waiting (for programs, limits, an engine), so there are more workers than cores: two
# per core, and one more where there are engine and servers. `make test WORKERS=0` runs all in one process, for a debugger.
WORKERS ?=
PYTEST := $(BIN)/python -m pytest -q --dist loadgroup -n

# What a newcomer can wait for: nothing that needs an engine, a server, programs of others or a corpus.
QUICK := not slow and not nightly and not long and not forks and not docker and not local and not agents and not ray
test: $(STAMP) ## run the tests of each part: no engine, no server (five minutes)
	@echo "About 5 minutes on two quiet cores. \`make check\` adds containers and servers, \`make test-all\` everything."
	$(PYTEST) $(or $(WORKERS),4) -m "$(QUICK)"

# CI runs exactly this. `make -k check` continues after a failure and still fails at the end.
check: format-check lint types docs test-change ## format, lint, layers, strict types, site, tests

format: $(STAMP) ## format the source and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

format-check: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP) ## build the documentation site in out/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# What runs per change: all but the corpora. ONLY="docker or local" chooses among it (the workflow's jobs).
ONLY ?=
test-change: $(STAMP)
	$(PYTEST) $(or $(WORKERS),5) --durations=25 --durations-min=5 \
		-m "not nightly and not long$(if $(ONLY), and ($(ONLY)))"

test-all: $(STAMP) ## run every test that is not a whole training: whole corpora too (half an hour)
	$(PYTEST) $(or $(WORKERS),5) -m "not long"

# One at a time: each needs the whole machine. How far a reward rises in a few steps is partly chance.
test-long: $(STAMP) ## whole trainings on a local server, and Ray clusters (half an hour)
	$(BIN)/python -m pytest -q -m long

test-agents: agent-programs ## run agent programs in sandboxes and compare them with evals (ten minutes)
	$(BIN)/python -m pytest -q -s -m agents

parity: $(STAMP) ## print the parity table: episodes against evals, case by case
	$(BIN)/python -m pytest -v tests/parity/test_corpus.py

# All that are supported (half an hour), or VERSIONS="inspect-ai=0.3.280 tinker-cookbook=newest".
VERSIONS ?=
compat: $(STAMP) ## contract tests and parity over releases of Inspect and the cookbook
	$(BIN)/python -W ignore scripts/compat.py --jobs $(or $(filter-out 0,$(WORKERS)),2) \
		$(if $(VERSIONS),$(VERSIONS),--write)

# Releases that exports were tried with; this project does not depend on them.
TRAINERS := trl==1.16.0 accelerate psutil verl==0.9.1 verifiers==0.4.0 ray tensordict==0.10.0 \
	omegaconf antlr4-python3-runtime==4.9.3 hydra-core codetiming torchdata msgpack pyvers orjson
trainers: $(STAMP) ## give exports to the released code of TRL, verl and verifiers
	@$(BIN)/python -m pip --disable-pip-version-check install -qq --no-deps --upgrade --target .trainers $(TRAINERS)
	PYTHONPATH=.trainers $(BIN)/python -m pytest -q tests/export/test_trainers.py

# Each in a venv of its own: they need different releases of mcp, and the extra `agents` of openai.
CLIENTS := verifiers==0.4.0 openenv==0.10.0 trl==1.16.0
CLIENT_TESTS := hatchling hypothesis pip pytest pytest-asyncio pytest-timeout

# nemo-gym asks for a patch release of Python that few have; its code runs with any 3.13.
NEMO_GYM := nemo-gym==0.7.0
PYTHON313 ?= $(shell python3.13 -c 'import sys; print(sys.executable)' 2>/dev/null)

clients: $(STAMP) ## run episodes for the released code of verifiers, OpenEnv, TRL and NeMo Gym
	@for client in $(CLIENTS); do \
		venv=.clients/$${client%%=*} && $(BIN)/python -m uv venv -q --allow-existing --python $(BIN)/python $$venv && \
		$(BIN)/python -m uv pip install -q --python $$venv/bin/python -e .[serve] $$client torch==2.13.0 $(CLIENT_TESTS) && \
		$$venv/bin/python -m pytest -q tests/serve/test_$${client%%=*}.py || exit 1; \
	done
	@if [ -z "$(PYTHON313)" ]; then \
		echo "Without Python 3.13 NeMo Gym is left out: make clients PYTHON313=/path/to/python3.13"; exit 0; fi; \
	$(PYTHON313) -m venv .clients/nemo-gym && \
	.clients/nemo-gym/bin/python -m pip install -q --ignore-requires-python $(NEMO_GYM) && \
	$(BIN)/python -m pytest -q tests/serve/test_nemo_gym.py

update: $(STAMP) ## refresh the lock (uv.lock, constraints.txt) and say what changed
	$(BIN)/python scripts/update_lock.py

# tests/test_lock.py compares the files; this also asks the index whether uv would lock the same.
lock-check: $(STAMP)
	$(BIN)/python scripts/update_lock.py --check

# Needs gcc 12 for both architectures (Debian 12: gcc, gcc-aarch64-linux-gnu).
executor: ## build the programs that run commands and carry connections in containers
	$(MAKE) -B -C src/inspect_docker_pool/native
	$(MAKE) -B -C src/inspect_tinker_plugin/agents/native

# A failing case says how to run it alone.
EPISODES ?= 10000
SEED ?= 0
faults: $(STAMP) ## run the fault campaign: 10,000 episodes, each with a random fault (ten minutes)
	INSPECT_DISPLAY=none $(BIN)/python -W ignore -m tests.faults.campaign \
		--episodes $(EPISODES) --seed $(SEED)

MINUTES ?= 30
soak: $(STAMP) ## run fault campaigns with logs for half an hour (MINUTES=5): nothing may grow
	INSPECT_DISPLAY=none $(BIN)/python -W ignore -m tests.faults.campaign.soak \
		--minutes $(MINUTES) --seed $(SEED)

# The older bridge is measured as well if its source is given: make bench BENCH="--bridge FOLDER".
BENCH ?=
bench: $(STAMP) ## print the table of speeds, beside evals and envs written by hand (ten minutes)
	$(BIN)/python -W ignore -m benchmarks.table $(BENCH)

clean: ## remove what demo and the tools wrote (not .venv)
	rm -rf out logs build dist .mypy_cache .pytest_cache .ruff_cache
