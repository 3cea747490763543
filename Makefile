# `make demo` and `make test` work in a fresh clone: they make the environment they need, once.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 2
ARGS   ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
VERSION := import sys; print("%d.%d" % sys.version_info[:2])
SAY_JAX := from importlib.metadata import version; print("Testing with JAX", version("jax"))

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all rest fast lint sanitize tpu tpu-compiler tpu-interpret triton triton-compiler hopper \
  hopper-few hopper-compiler hopper-budgets cuda cuda-compiler docs clean

help:
	@echo "make demo      run the demo                          ARGS: what follows 'glax demo'"
	@echo "make test      linters, unit tests, fast tests       ARGS: more options for pytest"
	@echo "make test-all  the same, then all other tests        ARGS: more options for pytest"
	@echo "make rest      the tests that make test leaves out   ARGS: more options for pytest"
	@echo "make fast      the tests marked fast alone           ARGS: more options for pytest"
	@echo "make lint      ruff and pyright alone"
	@echo "make sanitize  the native kernels' own tests, with the compiler's sanitizers and for arm64"
	@echo "make tpu       the TPU kernels, by the TPU compiler     ARGS: --few, a minute instead of five"
	@echo "make tpu-interpret   the TPU kernels in the interpreter: every case, of which make rest runs a part"
	@echo "make triton    the GPU kernels in Triton's interpreter, and compiled; needs Python 3.12"
	@echo "make hopper    the Hopper kernels in the interpreter, and compiled; needs Python 3.12"
	@echo "make hopper-few   each of the Hopper kernels once, in the interpreter"
	@echo "make cuda      the CUDA kernels by NVRTC, for every architecture"
	@echo "make docs      the documentation as a site, in build/site"
	@echo "make install   the environment alone"
	@echo "make clean     remove environments, builds, caches and outputs"
	@echo
	@echo "PYTHON=$(PYTHON) makes the environment VENV=$(VENV); JOBS=$(JOBS) test processes run at a time."
	@echo "Another Python needs another environment: make test PYTHON=python3.13 VENV=.venv-3.13"

install: $(STAMP)

demo: $(STAMP)
	@$(BIN)/glax demo $(ARGS)

# tests/conftest.py marks the unit tests and those marked fast as core.
test: lint
	@$(BIN)/python -c '$(SAY_JAX)'
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m core $(ARGS)

# In two runs: a process then compiles half as many programs.
rest: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not core and not thorough" tests/conformance $(ARGS)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not core" --ignore tests/conformance tests $(ARGS)

test-all:
	@$(MAKE) test
	@$(MAKE) rest

fast: $(STAMP)
	@$(BIN)/python -c '$(SAY_JAX)'
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m fast $(ARGS)

# pyright is JavaScript: by the node that pip has installed, whatever node is on PATH, and without a look for a newer pyright.
PYRIGHT := PYRIGHT_PYTHON_GLOBAL_NODE=off PYRIGHT_PYTHON_IGNORE_WARNINGS=on $(BIN)/pyright
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYRIGHT) --pythonpath $(BIN)/python

# Needs a C++ compiler, and no environment: where one is at hand, its jaxlib has the headers for one more file.
sanitize:
	@JOBS=$(JOBS) PYTHON=$(BIN)/python tests/native/sanitize

# The compilers below lie apart: in the environment, JAX would look for TPUs and GPUs.
APART = $(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target

LIBTPU := $(shell sed -n '1s/.*libtpu \([0-9.]*\),.*/\1/p' benchmarks/tpu/table.txt)
tpu-compiler: $(STAMP)
	@test -d build/libtpu-$(LIBTPU) || { $(APART) build/part libtpu==$(LIBTPU) && mv build/part build/libtpu-$(LIBTPU); }

tpu: tpu-compiler
	PYTHONPATH=build/libtpu-$(LIBTPU) $(BIN)/python -m benchmarks.tpu.compile --check $(ARGS)

tpu-interpret: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/conformance/test_pallas_tpu*.py $(ARGS)

# In processes of their own: where Triton's interpreter is on, nothing compiles. BUDGETS takes a part of the tests that have a case
# for each GPU. The plugin knows NVIDIA's compiler, and needs no GPU.
TRITON := triton==3.9.0 jax-triton==0.4.1
JAX_VERSION := from importlib.metadata import version; print(version("jax"))
triton-compiler: $(STAMP)
	@jax=$$($(BIN)/python -c '$(JAX_VERSION)') && test -d build/triton-$$jax || \
	  { $(APART) build/part $(TRITON) jax-cuda13-plugin==$$jax && mv build/part build/triton-$$jax; }

triton: triton-compiler
	@export PYTHONPATH=build/triton-$$($(BIN)/python -c '$(JAX_VERSION)') && \
	  $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/conformance/test_triton.py tests/conformance/test_triton_delta.py \
	    tests/conformance/test_triton_gate_sums.py tests/conformance/test_triton_replay.py \
	    tests/conformance/test_triton_softmax.py tests/conformance/test_triton_softmax_step.py tests/conformance/test_triton_grouped.py \
	    tests/conformance/test_triton_selective.py \
	    tests/parallel/test_parallel_overlap.py::test_triton_kernels_in_parts_do_no_more \
	    'tests/parallel/test_parallel_overlap.py::test_kernels_in_parts_work_beside_the_exchange[triton]' $(ARGS) && \
	  $(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/hardware/test_triton_compile.py -k budgets $(BUDGETS) && \
	  $(BIN)/python -m pytest tests/hardware/test_triton_compile.py -k "not budgets"

# The plugin of CUDA compiles with no GPU here, and with NVIDIA's compiler beside it.
NVCC := nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-nvdisasm==13.5.37
hopper: hopper-budgets
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/conformance/test_hopper*.py $(ARGS)

# Every kernel once, with each gate and packing, forward and gradient: the calls in FEW of tests/hopper.py.
hopper-few: $(STAMP)
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m few tests/conformance/test_hopper*.py $(ARGS)

hopper-compiler: $(STAMP)
	@jax=$$($(BIN)/python -c '$(JAX_VERSION)') && test -d build/hopper-$$jax || \
	  { $(APART) build/part jax-cuda13-plugin==$$jax jax-cuda13-pjrt==$$jax $(NVCC) && mv build/part build/hopper-$$jax; }

hopper-budgets: hopper-compiler
	@PYTHONPATH=build/hopper-$$($(BIN)/python -c '$(JAX_VERSION)') JAX_PLATFORMS=cpu \
	  $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -rP tests/hardware/test_hopper_compile.py $(BUDGETS)

NVRTC := 13.0.88
cuda-compiler: $(STAMP)
	@test -d build/nvrtc-$(NVRTC) || { $(APART) build/part-nvrtc nvidia-cuda-nvrtc==$(NVRTC) && \
	  mv build/part-nvrtc build/nvrtc-$(NVRTC); }

cuda: cuda-compiler
	@PYTHONPATH=build/nvrtc-$(NVRTC) $(BIN)/python -m pytest -n $(JOBS) -rP tests/hardware/test_cuda_compile.py $(ARGS)

# The tools are installed once, without glax, which is there; the build itself needs no network. Warnings and dead links are
# errors. No page's code is executed here: tests/tooling/test_docs.py does that.
DOCS_TOOLS := import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
  print(*(x for x in extras["docs"] if not x.startswith("glax")))
docs: $(STAMP)
	@$(BIN)/python -c 'import myst_parser, sphinx_book_theme, sphinx_copybutton, mathjax' 2>/dev/null || { \
	  pins=constraints/python$$($(BIN)/python -c '$(VERSION)').txt; test -f $$pins || pins=/dev/null; \
	  $(BIN)/python -m pip install -qq --disable-pip-version-check -c $$pins $$($(BIN)/python -c '$(DOCS_TOOLS)'); }
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -n -W --keep-going -q -b html docs build/site
	$(BIN)/python docs/check_site.py build/site
	@echo "The site is build/site/index.html"

# The stamp is newer than what the environment was made from; without it a run would install again each time.
# An environment without a working pip (an interrupted run, a Python since removed) is made again.
$(STAMP): pyproject.toml $(wildcard constraints/*.txt)
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	    { echo "glax needs Python 3.11 or newer, which $(PYTHON) is not: install one, or name it with PYTHON=..." >&2; exit 1; }; \
	  echo "Making $(VENV) with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv $(VENV) || \
	    { echo "$(PYTHON) -m venv failed: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	fi
	@version=$$($(BIN)/python -c '$(VERSION)') && pins=constraints/python$$version.txt && \
	if test -f $$pins; then \
	  echo "Installing glax and its tools into $(VENV), versions from $$pins (once; takes minutes)"; \
	  $(BIN)/python -m pip install -qq --disable-pip-version-check -c $$pins -e ".[dev]"; \
	else \
	  echo "Installing glax and its tools into $(VENV), newest versions: there is no $$pins (once; takes minutes)"; \
	  $(BIN)/python -m pip install -qq --disable-pip-version-check -e ".[dev]"; \
	fi || { echo "pip could not install glax and its tools; what it said is above" >&2; exit 1; }
	@touch $@

clean:
	rm -rf .venv .venv-newest build dist *.egg-info .pytest_cache .ruff_cache .hypothesis demo-out benchmarks/out
	find . -path './.*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
