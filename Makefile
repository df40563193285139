# CommitKV. Every target sets up what it needs; `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# A package index to look in as well. For the small CPU build of torch where pip would choose the CUDA one:
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
ENGINE := engines/smollm2-135m
# Flags with which llama.cpp ran here; its own choice for the machine crashed.
PEERS_CMAKE_ARGS = -DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON \
  -DGGML_AVX512=$(if $(shell grep -m1 -ow avx512f /proc/cpuinfo),ON,OFF)

# What of the evaluation `make peers` holds under other caches; `python -m perf.evaluate` prints them beside ours.
PEERS_ARGS ?= --contexts 1300 --questions 30 --shares 0.3

.DEFAULT_GOAL := help
.PHONY: help setup demo chat serve test lint peers bench eval load-tools load soak fuzz scale gpu clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(STAMP)  ## virtual environment with pinned packages (PYTHON=python3.12 to choose one)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(v not in ((3, 11), (3, 12)) and \
	  "setup: got Python %d.%d, expected 3.11 or 3.12; run make PYTHON=python3.12" % v)'
	@echo "setup 1/3: virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup 2/3: packages of pyproject.toml at the versions of constraints.txt (about 1.5 GB with the CPU torch)"
	@$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check -q -c constraints.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable '.[serve,perf,dev,kernels,rtx]'
	@echo "setup 3/3: Triton Inference Server 2.51 (wheel nvidia-pytriton, 55 MB, without its Python dependencies)"
	@$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check -q --no-deps nvidia-pytriton==0.7.0
	@touch $@

$(ENGINE)/manifest.json: $(STAMP)
	$(BIN)/python builder/build.py

demo: $(STAMP)  ## build, serve, hold the demo conversation under full and commitkv, report in out/demo
	$(BIN)/python builder/build.py
	$(BIN)/python -m perf.demo

chat: $(ENGINE)/manifest.json  ## talk to the model in the terminal (starts a server of its own)
	@$(BIN)/python -m perf.chat --serve

serve: $(ENGINE)/manifest.json  ## run the server on ports 8000-8002 until Ctrl-C
	@$(BIN)/python -m perf.serve

test: $(STAMP)  ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(STAMP)  ## ruff, mypy, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

peers: $(ENGINE)/manifest.json  ## llama.cpp, kvpress and quanto (20 minutes), then their rows on one conversation
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@echo "peers 1/4: llama-cpp-python 0.3.36 in .venv-peers, compiled for this machine (needs a C++ compiler)"
	@CMAKE_ARGS="$(PEERS_CMAKE_ARGS)" .venv-peers/bin/python -m pip install --disable-pip-version-check -q \
	  llama-cpp-python==0.3.36
	@.venv-peers/bin/python -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__, "loads")'
	@echo "peers 2/4: kvpress 0.5.5 in .venv-peers, for python -m perf.evaluation.peers"
	@.venv-peers/bin/python -m pip install --disable-pip-version-check -q \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==2.13.0 kvpress==0.5.5 hqq gguf psutil
	@echo "peers 3/4: optimum-quanto 0.2.7 in $(VENV), for transformers' QuantizedCache; compiles a small extension"
	@$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps optimum-quanto==0.2.7 ninja==1.13.2
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -c 'from optimum.quanto.library.extensions.cpp import ext; ext.lib'
	@echo "peers 4/4: python -m perf.evaluation.peers $(PEERS_ARGS); of perf.evaluate's conversations the first"
	@.venv-peers/bin/python -m perf.evaluation.peers $(PEERS_ARGS)

bench: $(ENGINE)/manifest.json  ## attention, decode and prefill beside other engines, then eight conversations at once
	$(BIN)/python -m perf.bench_attend
	$(BIN)/python -m perf.bench
	$(BIN)/python -m perf.many

eval: $(ENGINE)/manifest.json  ## quality against bytes of every policy: hours, goes on where it was stopped
	$(BIN)/python -m perf.evaluate

load-tools: $(STAMP)  ## perf_analyzer and aiperf, each in an environment of its own
	@test -x .venv-perf-analyzer/bin/python || $(PYTHON) -m venv .venv-perf-analyzer
	@.venv-perf-analyzer/bin/python -m pip install --disable-pip-version-check -q --no-deps tritonclient==2.51.0
	@$(BIN)/python -m perf.load.perf_analyzer --check
	@test -x .venv-aiperf/bin/python || $(PYTHON) -m venv .venv-aiperf
	@.venv-aiperf/bin/python -m pip install --disable-pip-version-check -q aiperf==0.13.0
	@.venv-aiperf/bin/aiperf --version

load: $(ENGINE)/manifest.json  ## agents with think times against two servers: full cache and CommitKV at equal KV memory
	$(BIN)/python -m perf.load

soak: $(ENGINE)/manifest.json  ## random turns, cancels, disconnects and bad requests for MINUTES=10
	$(BIN)/python -m perf.load.soak --minutes $(or $(MINUTES),10)

fuzz: $(ENGINE)/manifest.json  ## 20,000 malformed and random requests
	$(BIN)/python -m perf.load.fuzz --requests 20000

scale: $(ENGINE)/manifest.json  ## two servers behind nginx, one killed twice: what becomes of conversations
	$(BIN)/python -m perf.scale

gpu:  ## on an NVIDIA GPU: kernels and engine against their references, then timed; without one exit 2
	@for python in "$(PYTHON)" $(BIN)/python; do \
	  if "$$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	    echo "gpu: running with $$python, $$("$$python" -c 'import torch; print("torch", torch.__version__)')"; \
	    "$$python" tests/gpu/checks.py && exec "$$python" -m perf.kernels; exit $$?; \
	  fi; \
	done; \
	echo "gpu: no NVIDIA GPU here: neither $(PYTHON) nor $(BIN)/python has a torch that sees one; nothing was run"; exit 2

clean:  ## remove what the targets made, except the virtual environment
	rm -rf engines out .pytest_cache .mypy_cache .ruff_cache .hypothesis
