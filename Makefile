# README's two commands are `make ablation-position` and `make test`. Each first installs what is missing, into .venv.
#
#   make ablation-NAME   run what is left of a study, then write its report (ablations/NAME.py; dashes or underscores)
#                        BUDGET=smoke|quick|full SEEDS=N JOBS=N|auto DEVICE=auto|cpu|cuda TRACKING_URI=URI RESULTS=DIR
#                        UNTIL=decided CAP=N gives what is undecided more seeds, up to N
#   make sweep-NAME      tune named fields for each variant, with equal budgets; then make ablation-NAME TUNED=1
#                        TRIALS=N SAMPLER=tpe|random|grid STORAGE=URL BUDGET SEEDS JOBS DEVICE TRACKING_URI RESULTS as above
#   make ablations       every study that is not done yet, one after the other (same options; Ctrl-C saves, it resumes)
#   make dashboard       MLflow's pages on the local store (PORT=N RESULTS=DIR)
#   make test            the tests, on both cores, but for the slowest (ARGS='-k rope' for some)
#   make test-slow       the slowest: processes really killed, hundreds of random combinations, the dashboard in a browser
#                        (needs chromium; Debian: apt-get install chromium)
#   make lint            style, types, import rules
#   make bench           speed against bare loops and against x-transformers
#   make faults          plants every fault that diagnostics should name, trains what is healthy (ARGS='--only NAME'; it resumes)
#   make calibrate       how often verdicts are wrong where the truth is known, and how often they see what is there
#   make bench-attention time and memory of attention against length, and of decoding against the cache
#   make gpu-check       what only a CUDA GPU can show; says so where there is none (PYTHON=python3: any that holds torch)
#   make setup           only the installation (PYTHON=python3.12 to choose another one)
#
# When a command fails, make's last line has the command's own exit code ("Error 1": the study finished with failed runs, 2: a
# mistake in the request, 130: interrupted, state saved); make's own is 2 for all of them. Scripts that care call
# .venv/bin/harness, whose exit code is the real one. Ctrl-C reaches the command directly; make waits until it has saved.

VENV   := .venv
BENCH  := .venv-bench
PYTHON ?=
python := $(VENV)/bin/python

options = $(if $(BUDGET),--budget '$(BUDGET)') $(if $(SEEDS),--seeds '$(SEEDS)') $(if $(JOBS),--jobs '$(JOBS)') \
	$(if $(DEVICE),--device '$(DEVICE)') $(if $(TRACKING_URI),--tracking-uri '$(TRACKING_URI)') $(results)
results = $(if $(RESULTS),--results '$(RESULTS)')

.PHONY: help setup ablations test test-slow lint bench bench-attention calibrate faults gpu-check dashboard always
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

help:
	@sed -n 's/^#   //p' Makefile

setup: $(VENV)/installed

# `always` stands in for .PHONY, which knows no patterns. `python -m harness` is the console script, but survives a moved clone.
ablation-%: $(VENV)/installed always
	$(python) -m harness ablate '$*' $(options) $(if $(TUNED),--tuned) $(if $(UNTIL),--until '$(UNTIL)') $(if $(CAP),--cap '$(CAP)')

sweep-%: $(VENV)/installed always
	$(python) -m harness sweep '$*' $(options) $(if $(TRIALS),--trials '$(TRIALS)') $(if $(SAMPLER),--sampler '$(SAMPLER)') \
	    $(if $(STORAGE),--storage '$(STORAGE)')

# A study with failed runs (1) keeps no other waiting, and is the exit code in the end; a refused or an interrupted one stops all.
ablations: $(VENV)/installed
	@worst=0; for file in ablations/[!_]*.py; do \
	    name=$$(basename "$$file" .py); [ "$$name" = baseline ] && continue; code=0; \
	    $(python) -m harness ablate "$$name" $(options) || code=$$?; [ $$code -le 1 ] || exit $$code; \
	    [ $$code -eq 0 ] || worst=$$code; \
	done; exit $$worst

dashboard: $(VENV)/installed
	$(python) -m harness dashboard $(if $(PORT),--port '$(PORT)') $(results)

test: $(VENV)/installed
	$(python) -m pytest -n 2 --dist worksteal -m 'not slow' $(ARGS)

test-slow: $(VENV)/installed
	$(python) -m pytest -n 2 --dist worksteal -m slow $(ARGS)

lint: $(VENV)/installed
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	$(VENV)/bin/lint-imports

# Our side runs in .venv; the peer is started with the interpreter that sees x-transformers.
bench: $(BENCH)/installed
	$(python) tests/bench/bench.py --peer $(BENCH)/bin/python $(ARGS)

# First other people's models: what is healthy is left alone there too, and what is planted is named.
faults: $(BENCH)/installed
	$(BENCH)/bin/python docs/examples/huggingface.py
	$(python) tests/faults/matrix.py $(ARGS)

calibrate: $(VENV)/installed
	OMP_NUM_THREADS=1 $(python) tests/bench/calibrate.py $(ARGS)

bench-attention: $(VENV)/installed
	$(python) tests/bench/attention.py

# Needs no tracker and no installation: it runs on .venv if there is one, else on any Python that holds torch, Lightning and
# pydantic, as images made for GPUs do.
gpu-python = $(or $(PYTHON),$(wildcard $(python)),python3)
gpu-check:
	@$(gpu-python) -c 'import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, sys.argv[1:])))' torch pytorch_lightning pydantic || { \
	    echo "make: $(gpu-python) lacks torch, pytorch-lightning or pydantic: run make setup, or name another with PYTHON=python3" >&2; exit 1; }
	PYTHONPATH=. timeout 480 $(gpu-python) tests/bench/gpu_check.py

# The file is touched last, so an interrupted installation is taken up again. The candidates are run, not only looked for:
# pyenv answers for versions that are not active. Debian has venv in a package of its own.
$(VENV)/installed: pyproject.toml .ci/constraints.txt
	@$(python) -m pip --version >/dev/null 2>&1 || { found=; \
	for candidate in $(or $(PYTHON),python3.11 python3 python3.12); do \
	    if "$$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; \
	    then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "make: no Python 3.11 or 3.12 here (tried $(or $(PYTHON),python3.11 python3 python3.12)): install it, or name one with PYTHON=/path/to/python3.11" >&2; \
	    exit 1; \
	fi; \
	"$$found" -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "make: $$found has no venv module: install it (Debian, Ubuntu: apt-get install python3.11-venv)" >&2; exit 1; }; \
	"$$found" -m venv $$($(python) -c '' 2>/dev/null || echo --clear) $(VENV); }
	$(python) -m pip install --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[dev]'
	@touch $@

# x-transformers and transformers must not stand in .venv, where Lightning would find them or what comes with them. So they get an
# environment laid over .venv: it sees all of .venv and nothing of it is seen there.
$(BENCH)/installed: $(VENV)/installed
	$(python) -m venv --clear --without-pip $(BENCH)
	@echo "import site; site.addsitedir('$$($(python) -c "import sysconfig; print(sysconfig.get_path('purelib'))")')" \
	    > "$$($(BENCH)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/runtime.pth"
	$(BENCH)/bin/python -m pip install --disable-pip-version-check --constraint .ci/constraints.txt --editable '.[bench]'
	@touch $@
