# make quickstart   train a tiny model with OPO on this machine and write a report
# make test         lint and tests
# make docs         the documentation site, in build/site
# All set up what they need first; the second time that takes no time. Options of the setup:
# PYTHON=python3.12 (creates the environment), STACK=cpu|cluster, VENV=.venv; of the tests: WORKERS=2
.PHONY: quickstart test docs lint format setup

VENV ?= .venv
DOCS_VENV ?= .venv-docs
WORKERS ?= 2
SCRIPTS = .ci/run $(wildcard tools/*.sh slurm/*.sh slurm/*.sbatch)
export PYTHON STACK VENV

quickstart: models/tiny_arithmetic/config.json
	$(VENV)/bin/megatron-opo train recipes/quickstart_cpu.yaml --fresh

models/tiny_arithmetic/config.json: | setup
	$(VENV)/bin/python tools/make_tiny_model.py --out models/tiny_arithmetic

test: lint
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest \
		-n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/shellcheck --external-sources $(SCRIPTS)
	$(VENV)/bin/basedpyright --pythonpath $(VENV)/bin/python

format: setup
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(DOCS_VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict

$(DOCS_VENV)/installed: requirements/docs.txt
	$(or $(PYTHON),python3) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet -r $<
	touch $@

setup:
	@bash tools/setup.sh
