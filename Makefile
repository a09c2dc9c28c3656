# Every target builds the environment it needs on a fresh machine.
PYTHON ?= python3
ENV := .venv
VERL := .venv-verl
WORKERS ?= 2

.PHONY: train test lint docs clean env env-verl

env: $(ENV)/.ready
env-verl: $(VERL)/.ready

# torch goes in first and pinned: another package's plain dependency on it would fetch a CUDA build.
$(ENV)/.ready: pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(ENV)
	$(ENV)/bin/pip install -q -c requirements/constraints.txt torch numpy
	$(ENV)/bin/pip install -q -c requirements/constraints.txt -e '.[dev]'
	touch $@

# verl needs an older transformers than the rest.
$(VERL)/.ready: pyproject.toml requirements/verl.txt
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install -q -c requirements/verl.txt torch numpy
	$(VERL)/bin/pip install -q -r requirements/verl.txt
	$(VERL)/bin/pip install -q --no-deps -e .
	touch $@

lint: env
	$(ENV)/bin/ruff format --check .
	$(ENV)/bin/ruff check .
	$(ENV)/bin/mypy

train: env
	$(ENV)/bin/proxpo train quickstart --out runs/quickstart

docs: env
	$(ENV)/bin/python scripts/build_docs.py

test: env env-verl lint
	$(ENV)/bin/python scripts/build_docs.py --check
	OMP_NUM_THREADS=1 PROXPO_VERL_PYTHON=$(abspath $(VERL)/bin/python) \
		$(ENV)/bin/python -m pytest -n $(WORKERS)

clean:
	rm -rf $(ENV) $(VERL) build *.egg-info
