# `make demo` and `make test` do all the set-up on a fresh machine: a virtual environment in .venv with the pinned
# versions of constraints.txt. Only Python 3.11 or newer and make are needed.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Without bytecode each process that imports PyTorch compiles it anew, which takes five seconds.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test tests exhaustive quick lint docs benchmark gpu versions release clean

# gradguard and what the demo imports. PyTorch warns where NumPy is missing. Bytecode of all of PyTorch would take a
# half of the time; Python writes that of the modules that it imports.
.venv/demo-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) --no-compile --editable . numpy
	@touch $@

# All that is tested against too.
.venv/ready: .venv/demo-ready
	$(PIP) --editable '.[dev]'
	@# Composer's wheel wants an older torch than its code does.
	$(PIP) --no-deps mosaicml mosaicml-cli coolname
	@touch $@

# Train a real model on real text, unclipped; then with the threshold that its record recommends; compare.
demo: .venv/demo-ready
	$(BIN)/gradguard run --force --out runs/unclipped examples/char_lm.py
	$(BIN)/gradguard run --force --out runs/clipped --clip from=runs/unclipped examples/char_lm.py
	$(BIN)/gradguard report runs/unclipped runs/clipped --out runs/report.html

# At once: the linters alone would leave all cores but one idle for a minute.
test: .venv/ready
	$(MAKE) --jobs 2 lint tests

# One process for each core, with one thread each. A file stays with one of them until the other has nothing left to do:
# what a file makes once is not made twice.
tests: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal -m 'not exhaustive'

# Every case of every table, of which `make test` runs 12 rows, or as many as hold each value, or the number that
# `@pytest.mark.sampled` asks for. All of it takes some hour and a half on two cores, so it comes in eight parts of a
# quarter of an hour: `make exhaustive PART=3/8` runs every eighth test from the third on, and so an eighth of each
# table. Properties are tried with 2,000 new cases each, where
# `make test` tries the same 60.
PART ?= 1/1
exhaustive: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal --hypothesis-profile deep --part $(PART)

# The tests that take milliseconds, for while you work.
quick: .venv/ready
	$(BIN)/python -m pytest -m 'not slow and not exhaustive'

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/zizmor --offline --quiet .github/workflows

.venv/docs-ready: .venv/demo-ready
	$(PIP) --editable '.[docs]'
	@touch $@

# The site, in site/. What is printed there about the end of Material for MkDocs in 2027 is for who maintains it.
docs: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo 'Open site/index.html; for the search: $(BIN)/mkdocs serve'

# The suite on the oldest torch that pyproject.toml allows and on the newest, each in an environment of some 5 GB.
versions:
	$(PYTHON) tests/versions.py

# The wheel and the source archive, built reproducibly into dist/ and checked. OPTIONS='--torch 2.11.0' checks more.
release: .venv/ready
	$(BIN)/python .ci/release.py $(OPTIONS)

benchmark: .venv/ready
	$(BIN)/python benchmarks/batch_clipping.py

# On a machine with a GPU, in an environment whose PyTorch was built for it: GPU_PYTHON=python make gpu.
GPU_PYTHON ?= $(BIN)/python
gpu:
	$(GPU_PYTHON) -m pytest tests/test_gpu.py tests/test_fake_cuda.py tests/gradient_check/test_triton.py
	$(GPU_PYTHON) benchmarks/gpu.py

clean:
	rm -rf .venv .versions runs site dist build
