# Everything starts here: `make demo` for a first table, `make test` for the suite.
PYTHON ?= python3
VENV ?= .venv
# Where pip looks for PyTorch besides its usual index. A machine without a GPU saves gigabytes with the CPU
# wheel index that pytorch.org shows under "Get Started": make demo TORCH_INDEX=ADDRESS
TORCH_INDEX ?=
PIP_INSTALL = $(VENV)/bin/pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: demo notebook results test test-all reliability lint format clean

demo: $(VENV)/installed
	$(VENV)/bin/andrea-exp sweep demo
	@echo "notebooks: make notebook (analysis/*.ipynb); commands: . $(VENV)/bin/activate"

notebook: $(VENV)/installed-notebook
	$(VENV)/bin/jupyter lab analysis

# All tables, claims and notebooks of analysis/ again, from the records that it keeps.
results: $(VENV)/installed-notebook
	$(VENV)/bin/python analysis/redraw.py

test: $(VENV)/installed-dev
	$(VENV)/bin/pytest -m "not slow"

test-all: $(VENV)/installed-dev
	$(VENV)/bin/pytest

reliability: $(VENV)/installed-dev
	$(VENV)/bin/python tests/reliability.py

lint: $(VENV)/installed-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy andrea_exp hydra_plugins/andrea_exp_sweeper.py

format: $(VENV)/installed-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV)

$(VENV)/bin/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "andrea-exp needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/pip pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a few minutes the first time)"
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP_INSTALL) --editable ".[dev]"
	@touch $@

$(VENV)/installed-notebook: $(VENV)/installed
	$(PIP_INSTALL) --editable ".[notebook]"
	@touch $@
