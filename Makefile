# The two commands to know: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PROMPT ?= Write a Python function that checks whether a word is a palindrome.
API := api options generation errors glide decoding.methods models.families engine.engine engine.sequence

.PHONY: demo test test-full bench docs clean

demo: .venv/ready  ## set up, fetch the default model, answer a sample prompt
	@echo 'longspec generate --compare "$(PROMPT)"'
	@$(BIN)/longspec generate --compare "$(PROMPT)"

test: .venv/ready-test  ## set up, then everything that guards a change
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal -m "not full"

test-full: .venv/ready-test  ## the tests that take minutes as well
	$(BIN)/pytest -n 2 --dist worksteal

bench: .venv/ready  ## vanilla decoding side by side with transformers
	$(BIN)/longspec bench generate --baseline hf --methods vanilla --workload repo:512 --max-new-tokens 48

docs: .venv/ready-test  ## the API pages, made from docstrings
	$(BIN)/pdoc --output-directory build/docs $(API:%=longspec.%)
	@echo build/docs/index.html

.venv/ready: pyproject.toml constraints.txt scripts/setup
	@PYTHON="$(PYTHON)" scripts/setup

.venv/ready-test: .venv/ready
	@PYTHON="$(PYTHON)" scripts/setup test

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .hypothesis
