# `make cast` runs the main job, `make test` every check. Each makes the virtual environment that it needs.

PYTHON ?= python3
VENV := .venv
VENV_DEV := .venv-dev
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help cast test format clean

help:
	@echo "make cast    install castoff in $(VENV) (no torch) and predict a prefill step of GLM-5.2"
	@echo "make test    install everything that tests need in $(VENV_DEV) and run scripts/check"
	@echo "make format  let ruff format the code and fix what it can"
	@echo "make clean   remove both environments and all caches"
	@echo "PYTHON=...   the interpreter to use, 3.11 or newer (default: python3)"

cast: $(VENV)/.installed
	$(VENV)/bin/castoff cast zai-org/GLM-5.2 --device ATLAS_800_A3_752T_128G_DIE --num-devices 16 \
	    --tp-size 16 --dp-size 1 --ep-size 16 --context-length 61000 --query-length 4096 --num-queries 1 \
	    --num-mtp-tokens 3 --compile --quantize-linear-action W4A8_STATIC --dump-input-shapes

test: $(VENV_DEV)/.installed
	PATH="$(CURDIR)/$(VENV_DEV)/bin:$$PATH" scripts/check

format: $(VENV_DEV)/.installed
	$(VENV_DEV)/bin/ruff format .
	$(VENV_DEV)/bin/ruff check --fix .

# A stamp is written last, so an interrupted installation is taken up again by the next call.
$(VENV)/.installed: pyproject.toml
	$(call make_venv,$(VENV))
	$(VENV)/bin/python $(PIP_INSTALL) --editable .
	@touch $@

$(VENV_DEV)/.installed: pyproject.toml constraints.txt
	$(call make_venv,$(VENV_DEV))
	$(VENV_DEV)/bin/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev,run,lab,tables,hf]'
	@touch $@

define make_venv
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("castoff needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": call make with PYTHON=python3.11, say")'
	$(PYTHON) -m venv $(1)
endef

clean:
	rm -rf $(VENV) $(VENV_DEV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
