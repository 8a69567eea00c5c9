# `make demo` and `make test` need only make and a Python >= 3.10 with venv; everything else goes to .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp

# A thousand processes of tests import the package: each would compile it again where the environment forbids bytecode.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test setup lint wheel megatron browser collected clean

demo: setup
	$(BIN)/tokenring demo

# What comes first runs two at a time: most of it waits for mypy, or for the network. pytest comes last, so that its
# summary closes the output. What `megatron` was to install, no test skips; in CI nor what `browser` was to.
test: setup
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint wheel megatron browser collected
	TOKENRING_MEGATRON_REQUIRED=1 $(BIN)/python -m pytest -n 4 --dist loadscope --no-loadscope-reorder --durations=25

setup: $(STAMP)

# The stamp is there only while the set-up is whole: an interrupted one starts afresh, a changed
# requirement is installed over the old ones. Python compiles what it imports by itself: of torch that is
# a part, and compiling the whole takes half the time of the set-up.
$(STAMP): pyproject.toml constraints.txt
	@test -e $@ || { echo "setting up $(VENV) (a minute or more: it installs torch)"; \
	    $(PYTHON) -m venv --clear $(VENV); }
	@rm -f $@
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

lint: setup
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python ci/rooms.py

wheel: setup
	ci/wheel $(BIN)/python

# Each version of Megatron-core in a folder of its own, without what it says it needs: on a CPU it needs none of that.
megatron: $(VENV)/megatron/.stamp

$(VENV)/megatron/.stamp: $(STAMP) ci/megatron-versions.txt
	ci/megatron $(BIN)/python $(VENV)/megatron
	@touch $@

# Only in CI; elsewhere tests of pictures skip where there is no browser.
browser:
	ci/browser

# The tests as pytest compiles them, once and not by each of its workers; where that fails, they say why. After `wheel`,
# which copies the folders that this writes to.
collected: setup wheel
	@$(BIN)/python -m pytest --collect-only --quiet >/dev/null 2>&1 || true

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
