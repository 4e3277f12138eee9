# Two commands do all the set-up in .venv: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
FLOORS := .venv-floors
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: gpu help demo test fuzz sanitize lint docs floors bench report bench-check static clean

help:
	@echo "make demo         train DCN and a DNN on a generated click log, beside the best possible logloss"
	@echo "make test         lint, types and all tests"
	@echo "make fuzz         five minutes of hostile use at random: operators, swaps, damaged files, kills"
	@echo "make sanitize     the C++ kernels' tests and a minute of fuzzing with address and undefined-behaviour checks"
	@echo "make docs         the documentation as a site, into site/; a link that leads nowhere is an error"
	@echo "make floors       a smoke set with the oldest versions that pyproject.toml admits, in .venv-floors"
	@echo "make bench        three runs of the benchmarks, against the peers' own packages, into benchmarks/results/"
	@echo "make report       tables and figures of these runs, into README.md and docs/"
	@echo "make bench-check  the benchmarks' ratios against the committed baseline"
	@echo "make gpu          on a machine with a GPU: the tests that need one, the doctor, the benchmarks; into build/gpu/"
	@echo "make static       registers, spills, load widths and bytes per row of the GPU kernels, and the launches of a"
	@echo "                  training step, without a GPU"

demo: $(VENV)/.user
	$(BIN)/fastcross compare --models dcn,dnn

# The workers have more threads than there are cores: one that waits must leave its core to the others.
test: $(VENV)/.developer lint
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest --numprocesses auto --dist worksteal

fuzz: $(VENV)/.developer
	$(BIN)/python tests/fuzz --minutes $(or $(MINUTES),5)

# Python is not instrumented, so the checks come before it, and libstdc++ with them, which the kernels throw with.
# A package of its own under build/, which the tests import: the normal library stays as it is.
SANITIZED := build/sanitized/lib
CHECKS := -fsanitize=address,undefined -fno-sanitize=null
UNDER_CHECKS := LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(abspath $(SANITIZED)) $(BIN)/python -P

sanitize: $(VENV)/.developer
	CXXFLAGS="-O1 -g -fno-omit-frame-pointer -fno-sanitize-recover=all $(CHECKS)" LDFLAGS="$(CHECKS)" \
		$(BIN)/python setup.py -q build --build-base build/sanitized --build-lib $(SANITIZED)
	$(UNDER_CHECKS) -m pytest -o pythonpath=tests --numprocesses auto tests/ops tests/layers/test_embedding.py \
		tests/test_optim*.py tests/kernels/test_cpu.py
	$(UNDER_CHECKS) tests/fuzz --minutes 1 --only operators,embedding,optimiser

lint: $(VENV)/.developer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror kernels/cpu/*.cpp kernels/cpu/*.h

# The variable silences an announcement of Material's authors about other projects.
docs: $(VENV)/.developer
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The library that the oldest PyTorch builds, and then the one that the newest builds.
floors: $(FLOORS)/.done $(VENV)/.user
	$(FLOORS)/bin/python setup.py -q build_ext --inplace
	$(FLOORS)/bin/python -m pytest tests/test_floors.py tests/ops/test_operators.py
	$(BIN)/python setup.py -q build_ext --inplace
	$(FLOORS)/bin/python -m pytest tests/ops/test_operators.py

bench: $(VENV)/.developer
	$(BIN)/python -m benchmarks.run --runs 3

report: $(VENV)/.developer
	$(BIN)/python -m benchmarks.report

bench-check: $(VENV)/.developer
	$(BIN)/python -m benchmarks.check

# PyTorch and Triton for the GPU are there before: `make` installs what PyPI's torch is.
gpu: $(VENV)/.developer
	$(BIN)/python -m pytest -m gpu
	$(BIN)/fastcross doctor --output build/gpu
	$(BIN)/python -m benchmarks.run --runs 3

static: $(VENV)/.developer
	$(BIN)/python -m benchmarks.static.offline
	$(BIN)/python -m benchmarks.static.drawn
	$(BIN)/python -m benchmarks.static.row_updates
	$(BIN)/python -m benchmarks.static.embedding
	$(BIN)/python -m benchmarks.static.multiplicative
	$(BIN)/python -m benchmarks.static.host
	$(BIN)/python -m benchmarks.static.step

# What is compiled is built with the PyTorch that it will run with: without isolation, and PyTorch comes first.
$(VENV)/.user: pyproject.toml constraints.txt setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools torch numpy
	$(PIP) --no-build-isolation --editable ".[train]"
	touch $@

# The peers pin versions that contradict each other: their list is complete and installed as it stands.
$(VENV)/.developer: $(VENV)/.user requirements-peers.txt
	$(PIP) --no-build-isolation --editable ".[train,tune,export,serve,sklearn,docs,dev]"
	$(PIP) --no-deps --requirement requirements-peers.txt
	touch $@

$(FLOORS)/.done: pyproject.toml constraints-floors.txt
	test -x $(FLOORS)/bin/python || $(PYTHON) -m venv $(FLOORS)
	$(FLOORS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-floors.txt "setuptools>=77" torch numpy
	$(FLOORS)/bin/pip install --quiet --disable-pip-version-check --constraint constraints-floors.txt \
		--no-build-isolation --editable ".[train,tune,export,serve,sklearn]" pytest hypothesis
	$(FLOORS)/bin/pip install --quiet --disable-pip-version-check --no-deps torchfm==0.7.0
	touch $@

clean:
	rm -rf $(VENV) $(FLOORS) build dist site *.egg-info
