# Everything runs in .venv, which is made here on first use. `make` alone lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
AOT_JOBS ?= 2
AOT ?=
EMULATOR ?=
FULL ?=
ONLY ?=
AOT_TRITON ?= 3.6.0
AOT_VENV := .venv-aot
CLIENTS_VENV := .venv-clients
WHEELS_VENV := .venv-wheels
SCHEMAS ?=
WHEEL_LIMIT := 20000000
# Containers often set it; then every process of a test would compile all of src/ and its own tests again.
unexport PYTHONDONTWRITEBYTECODE
INSTALLED := pyproject.toml setup.py constraints.txt $(wildcard src/sfumato/ops/cpu/csrc/*)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu test-emulated test-aarch64 test-clang test-clients test-ray aot levels soak schemas lint style format options evaluate picture wheel wheels test-wheel clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/.installed ## watch the embedded model solve a Sudoku and answer questions
	@$(BIN)/sfumato demo

test: style ## lint, types and the fast tests
	@$(BIN)/python -m pytest -n 4 --dist worksteal -p tests.support.types_beside

test-slow: $(VENV)/.installed-test ## the tests that take minutes
	@$(BIN)/python -m pytest -m "slow and not gpu" --timeout 1800

test-gpu: $(VENV)/.installed-test ## the tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu --timeout 1800

test-emulated: $(VENV)/.installed-test ## the machine code of the GPU kernels in an emulator: EMULATOR=its folder, FULL=1 for all formats
	@SFUMATO_EMULATOR="$(EMULATOR)" FULL="$(FULL)" $(BIN)/python -m pytest -rs tests/ops/triton/test_machine_code.py

test-aarch64: $(VENV)/.installed-test ## the compiled operations on ARM, by a cross-compiler and an emulator
	@$(BIN)/python -m pytest -m slow --timeout 3600 tests/ops/cpu/test_aarch64.py

test-clang: $(VENV)/.installed-test ## the compiled operations as clang compiles them, without installing them
	@$(BIN)/python -m pytest -m slow --timeout 3600 -rs $(if $(ONLY),-k "$(ONLY)") tests/ops/cpu/test_clang.py

test-clients: $(CLIENTS_VENV)/openai-3/.installed $(CLIENTS_VENV)/openai-2/.installed ## the clients of others, in pinned versions
	@! command -v npm > /dev/null || npm install --prefix tests/clients/npm --silent --no-audit --no-fund \
		--no-package-lock
	@for one in openai-3 openai-2; do PYTHONPATH=src $(CLIENTS_VENV)/$$one/bin/python -m pytest \
		-m clients tests/clients || exit 1; done

test-ray: $(CLIENTS_VENV)/ray/.installed ## two replicas on Ray Serve, which are killed and stopped
	@PYTHONPATH=src RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 $(CLIENTS_VENV)/ray/bin/python -m pytest \
		-m clients tests/deploy

aot: $(AOT_VENV)/$(AOT_TRITON)/.installed ## compile the GPU kernels, for GPUs that need not be here
	@PYTHONPATH=src $(AOT_VENV)/$(AOT_TRITON)/bin/python -m benchmarks.gpu_aot \
		--jobs $(AOT_JOBS) $(AOT)

levels: $(VENV)/.installed-test ## measure what each instruction set multiplies a second, beside torch
	@$(BIN)/python -m benchmarks.levels

soak: $(VENV)/.installed-test ## 64 clients, some of which break the protocol, against the server for a minute
	@$(BIN)/python -m benchmarks.soak

schemas: $(VENV)/.installed-test ## 200 JSON schemas, 3 seeds, two models and more: does each reply match?
	@$(BIN)/python -m benchmarks.schemas $(SCHEMAS)

lint: style ## ruff and mypy
	@$(BIN)/mypy

style: $(VENV)/.installed-test
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { $(BIN)/ruff format --diff . ; exit 1; }

format: $(VENV)/.installed-test ## let ruff rewrite the files
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

options: $(VENV)/.installed ## write docs/options.md and docs/exclusions.md from the tables of options
	@$(BIN)/python docs/tables.py options > docs/options.md
	@$(BIN)/python docs/tables.py exclusions > docs/exclusions.md

evaluate: $(VENV)/.installed ## measure the embedded model on its held-out tasks
	@$(BIN)/sfumato eval

picture: $(VENV)/.installed ## draw the README's picture of the haze from a run of the embedded model
	@$(BIN)/python -m benchmarks.haze docs/haze.svg

.PHONY: docs
docs: $(VENV)/.installed-docs ## build the site of docs/ and the API reference into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict && echo "site/index.html"

# setuptools would carry files of an older build/ into the wheel, so it starts from none.
wheel: $(VENV)/.installed-test ## build the wheel and check its size and contents
	@rm -rf build dist
	@$(PIP) wheel --no-deps --wheel-dir dist .
	@test $$($(BIN)/python -m zipfile -l dist/*.whl | grep -c "sfumato/embedded[a-z_]*/model.safetensors") = 2 \
		|| { echo "the wheel lacks a packaged model" >&2; exit 1; }
	@! command -v c++ > /dev/null || $(BIN)/python -m zipfile -l dist/*.whl | grep _kernels.so \
		> /dev/null || { echo "the wheel lacks the compiled operations" >&2; exit 1; }
	@size=$$(cat dist/*.whl | wc -c); echo "wheel: $$size bytes (limit $(WHEEL_LIMIT))"; \
		test "$$size" -le $(WHEEL_LIMIT)

wheels: $(WHEELS_VENV)/.installed ## cross-compile the wheels of all platforms by Zig, and check them
	@$(WHEELS_VENV)/bin/python deploy/wheels.py $(ONLY)

test-wheel: ## install the wheel in a bare Debian without a compiler, and run the demo there
	@deploy/try_wheel.sh

clean: ## remove what the targets made, .venv too
	rm -rf $(VENV) $(AOT_VENV) $(CLIENTS_VENV) $(WHEELS_VENV) build dist site src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	rm -rf tests/clients/npm/node_modules
	rm -f src/sfumato/ops/cpu/_kernels.so
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { echo "$(PYTHON) not found: install Python 3.11 \
	to 3.14, or name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { \
		echo "$(PYTHON) is not Python 3.11 to 3.14; name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
		echo "$(PYTHON) cannot make virtual environments; on Debian: apt install python3-venv" >&2; \
		exit 1; }
	@$(PYTHON) -m venv $(VENV)

# Stamps: pip runs again only when what decides the installation has changed.
#
# For the demo: of the compiled levels the one that this machine takes, while another pip unpacks what the
# package needs, without the bytecode of all of torch: Python makes what it imports. All targets with tests
# need all levels, and install them.
$(VENV)/.installed: $(INSTALLED) | $(BIN)/python
	@echo "installing into $(VENV) (takes half a minute, and longer where it downloads)"
	@$(PIP) install -c constraints.txt 'setuptools>=77'
	@SFUMATO_LEVELS=native $(PIP) install --no-build-isolation --no-deps -e . & built=$$!; \
		$(BIN)/python -c 'import pathlib, tomllib; \
			text = pathlib.Path("pyproject.toml").read_text(); \
			print(*tomllib.loads(text)["project"]["dependencies"], sep="\n")' > $(VENV)/needs.txt && \
		$(PIP) install --no-compile -c constraints.txt -r $(VENV)/needs.txt; needs=$$?; wait $$built && exit $$needs
	@touch $@

$(VENV)/.installed-test: $(INSTALLED) | $(BIN)/python
	@echo "installing into $(VENV) (takes minutes the first time)"
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $(VENV)/.installed $@

# Triton in an environment of its own, which has all else from .venv.
$(AOT_VENV)/%/.installed: | $(VENV)/.installed-test
	@echo "installing Triton ($*) into $(@D)"
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq install 'numpy<2.3' \
		$(if $(filter newest,$*),triton,triton==$*)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	@touch $@

# The clients of others, which do not agree on a version of openai; all else is that of .venv.
$(CLIENTS_VENV)/%/.installed: tests/clients/requirements-%.txt | $(VENV)/.installed-test
	@echo "installing clients ($*) into $(@D)"
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq install -r $<
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	@touch $@

$(WHEELS_VENV)/.installed: deploy/wheels.txt | $(BIN)/python
	@echo "installing Zig's compiler into $(@D)"
	@$(BIN)/python -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq install -r $<
	@touch $@

$(VENV)/.installed-docs: $(INSTALLED) | $(BIN)/python
	@echo "installing into $(VENV) (takes minutes the first time)"
	@$(PIP) install -c constraints.txt -e '.[docs]'
	@touch $(VENV)/.installed $@
