# `make train` and `make test` need Python 3.11 or newer with venv, and nothing else: they install the rest into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install train test fast lint types format benchmark bench costs families chaos doctor study truth beside-trl findings world

install: .venv/installed

# torch comes first and by its pin, so that nothing that needs it can choose another build.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

train: install
	$(BIN)/tokencredit train

test: install lint types
	$(BIN)/python -m pytest -n 2

# Lint, types and the quick tests, in about 80 seconds on two cores once mypy's cache is warm.
fast: install lint types
	TOKENCREDIT_EXAMPLES=30 $(BIN)/python -m pytest -n 2 -m "not slow and not gpu"

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The table of the README: five seeds of the main job.
benchmark: install
	$(BIN)/python benchmarks/main_job.py

# The tables of benchmarks/RESULTS.md; TRL gets an environment of its own.
bench: install .trl-venv/installed
	$(BIN)/python benchmarks/text_step.py --trl .trl-venv/bin/python

# The tables of docs/gpu.md and of "On a GPU" in benchmarks/RESULTS.md, by formula: seconds on a CPU.
costs: install
	$(BIN)/python benchmarks/costs.py --write

# Every family of language models that the installed Transformers knows, tiny, through a run: benchmarks/families.md.
families: install
	$(BIN)/python benchmarks/families.py --write benchmarks/families.md

# The runs behind docs/findings.md, for hours, and their metrics into benchmarks/findings-data. `make study SEEDS=1` takes the first
# seed of each alone; the same command goes on where it was.
study: install
	$(BIN)/python benchmarks/study.py $(if $(SEEDS),--seeds $(SEEDS))

# Is the credit true? The main job with several critics, audited while it trains: three minutes a run on one core.
truth: install
	$(BIN)/python benchmarks/truth.py

# The main job by TRL, whose KL stands beside ours in docs/findings.md: about two minutes per run on one core.
beside-trl: .trl-venv/installed
	.trl-venv/bin/python benchmarks/beside_trl.py

# The figures and tables of docs/findings.md, from the committed metrics in benchmarks/findings-data.
findings: install
	$(BIN)/python benchmarks/findings.py

# Kills and damages real runs, resumes them, and compares with runs left in peace; as root, for the small disks.
chaos: install
	$(BIN)/python tests/chaos.py

# Runs whose critic or λ is made ill on purpose, and healthy ones, audited: what the diagnosis names.
doctor: install
	$(BIN)/python tests/audit_doctor.py

.trl-venv/installed:
	test -x .trl-venv/bin/python || $(PYTHON) -m venv .trl-venv
	.trl-venv/bin/python -m pip install --quiet torch==2.13.0
	.trl-venv/bin/python -m pip install --quiet trl==1.9.2
	touch $@

# Makes the built-in models anew.
world: install
	$(BIN)/python -m tokencredit.demo.build
