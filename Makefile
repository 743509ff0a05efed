.PHONY: setup demo test lint clean

setup:        ## make .venv once, with pinned versions
	@scripts/setup.sh

demo: setup   ## tiny checkpoint -> Megatron on 2 processes -> another layout -> back, compared bit for bit
	@.venv/bin/kimi-bridge demo

test: setup   ## all tests that run without a GPU (GPU tests skip themselves)
	@.venv/bin/python -m pytest -q

lint: setup   ## style, formatting and types
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

clean:        ## remove the environment and the demo's output
	rm -rf .venv .demo
