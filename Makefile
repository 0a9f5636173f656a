# `make demo` and `make test` do all their own set-up; `make check` is what to run before a commit.

PYTHON ?= python3
BIN := .venv/bin
PINS := pyproject.toml constraints.txt app/setup/install.py
NEW_ENOUGH := import sys; sys.version_info >= (3, 11) or sys.exit( \
	f"Outrider needs Python 3.11 or newer; $(PYTHON) is {sys.version.split()[0]}. Try: make PYTHON=python3.12")

.PHONY: demo test test-browser shadow laws mutants gpu gpu-carry gpu-doctor gpu-tests gpu-report gpu-recordings coverage check lint types layers links docs report report-quick notebooks test-notebooks book clean

demo: .venv/for-demo
	$(BIN)/outrider demo

# What tests compile is kept, wherever that is usually not: the processes they start read it, and so does the next run.
test: .venv/for-work
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal -m "not browser"

# The page in a real browser, with nothing beside it: a hand that presses Stop is quick.
test-browser: .venv/for-work
	$(BIN)/pytest tests/browser

# The whole products of the device suite, 2,000 rounds a trained drafter and 500 sizes a Triton kernel, on a shadow of a
# CUDA device and in Triton's interpreter.
shadow: .venv/for-work
	OUTRIDER_SHADOW=all $(BIN)/pytest -q --timeout 3600 -n auto --maxprocesses 8 --dist worksteal tests/core/shadow tests/core/kernels/test_gpu.py

# Every case of the tests of which `make test` runs some (tests/turns.py).
laws: .venv/for-work
	OUTRIDER_LAWS=all $(BIN)/pytest -q --timeout 3600 -n auto --maxprocesses 8 --dist worksteal \
		$(shell grep -rl --include='test_*.py' 'from tests.turns import' tests)

# Changes of the rules, the loop and the cache, each of which a test must notice: 100 places of each, drawn at random.
# What was found is kept in build/mutants/results.jsonl, and a run that was stopped goes on. SAMPLE=0 takes all places.
SAMPLE := 100
mutants: .venv/for-work
	$(BIN)/python -m tests.mutation.run --sample $(SAMPLE)

# All that a GPU has to show, in pieces: gpu-doctor, gpu-tests, gpu-report ONLY=text (then image, speech, batches,
# methods, engines), gpu-recordings. The report skips what this commit has measured. DEVICE=cpu tries the commands without
# a GPU, QUICK=1 measures little, BIN names another environment.
DEVICE := cuda
gpu: gpu-doctor gpu-tests gpu-report gpu-recordings

# For a machine without network: `make gpu-carry` puts SmolLM2 and the packages that an environment with torch and
# transformers lacks into build/carry, for the Python there. Copy this folder with build/carry, and run the pieces with
# BIN set to the environment there.
CARRY := build/carry
GPU_PYTHON := 3.12
GPU_PACKAGES := annotated-types diffusers gguf hypothesis importlib_metadata pydantic pydantic_core pytest-timeout \
	sortedcontainers typing-inspection
CARRIED := $(wildcard $(CARRY)/wheels)
GPU_RUN := $(if $(CARRIED),PYTHONPATH=$(CURDIR)/$(CARRY)/site:$(CURDIR)/.typing OUTRIDER_CACHE=$(CURDIR)/$(CARRY)/cache) $(BIN)/python

gpu-carry: .venv/for-work
	$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		$(foreach glibc,28 27 17,--platform manylinux_2_$(glibc)_x86_64) --dest $(CARRY)/wheels \
		$$(for name in $(GPU_PACKAGES); do grep -i "^$$name==" constraints.txt || echo $$name; done)
	OUTRIDER_CACHE=$(CARRY)/cache $(BIN)/outrider assets fetch smollm2-135m

$(CARRY)/site: $(CARRIED) | links
	$(BIN)/python -m pip install --quiet --no-index --no-deps --upgrade --target $@ $(CARRY)/wheels/*.whl
	touch $@

gpu-doctor gpu-tests gpu-report gpu-recordings: $(if $(CARRIED),$(CARRY)/site,$(if $(filter .venv/bin,$(BIN)),.venv/for-work))

gpu-doctor:
	-$(GPU_RUN) -P -m outrider.app.cli doctor --speed

# Without pytest-benchmark, where it is installed: beside xdist it warns, and warnings are errors.
gpu-tests:
	$(GPU_RUN) -m pytest -q -p no:benchmark -m gpu tests/core

gpu-report:
	$(GPU_RUN) -P -m outrider.app.cli report gpu --device $(DEVICE) --resume \
		$(if $(ONLY),--only $(ONLY)) $(if $(QUICK),--quick)

gpu-recordings:
	$(GPU_RUN) -P -m outrider.app.page.record_examples $(DEVICE) reports/gpu/traces

# The same with a count of the lines that run: at least 95 in 100 of core, 85 of all.
coverage: .venv/for-work
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n auto --maxprocesses 8 --dist worksteal -m "not browser" --cov --cov-report=
	$(BIN)/coverage report --fail-under=85
	$(BIN)/coverage report --include "core/*" --fail-under=95

check: lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n auto --maxprocesses 8 --dist worksteal -m "not slow and not browser"

lint: .venv/for-work
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory types layers

types: .venv/for-work links
	$(BIN)/mypy

# Which package may import which: the contracts in pyproject.toml.
layers: .venv/for-work
	$(BIN)/lint-imports --no-cache --no-logo

# The folders under their import names, for tools that read sources instead of importing them.
links:
	@mkdir -p .typing/outrider
	@for name in core app; do ln -sfn ../../$$name .typing/outrider/$$name; done
	@for name in text image speech; do ln -sfn ../../modalities/$$name .typing/outrider/$$name; done

# The documentation site: build/docs/index.html. Warnings are errors.
docs: .venv/for-work links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Hours: REPORT.md and what it is made of, in reports. What a run that was stopped has measured is kept.
report: .venv/for-work
	$(BIN)/outrider report all --resume

# The main sections alone, two prompts a command: build/report-quick/REPORT.md.
report-quick: .venv/for-work
	$(BIN)/outrider report all --quick

notebooks: .venv/for-work
	$(BIN)/jupyter lab notebooks/01-why-decoding-is-slow.ipynb

test-notebooks: .venv/for-work
	OUTRIDER_SMALL=1 $(BIN)/pytest -n 2 --dist worksteal tests/notebooks

book: .venv/for-work
	$(BIN)/python notebooks/book.py build/book

clean:
	rm -rf .venv .typing build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A venv without pip is one that could not be made whole: it is made again, and says again what is missing.
$(BIN)/pip:
	@$(PYTHON) -c '$(NEW_ENOUGH)'
	$(PYTHON) -m venv .venv

# The stamps are as old as the last set-up; a change of what they depend on sets up again, which is quick.
.venv/for-demo: $(PINS) | $(BIN)/pip
	$(BIN)/python -P app/setup/install.py app,speech
	@touch $@

.venv/for-work: $(PINS) | $(BIN)/pip
	$(BIN)/python -P app/setup/install.py app,speech,notebooks,judges,teacher,retrieval,train,docs,dev
	@touch $@ .venv/for-demo
