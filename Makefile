.PHONY: setup setup-vllm setup-skyrl demo test test-vllm test-skyrl gpu-check lint clean

setup:        ## make .venv once, with pinned versions
	@scripts/setup.sh

setup-vllm:   ## make .venv-vllm once, with pinned versions of vLLM and what it needs
	@scripts/setup_vllm.sh

setup-skyrl:  ## make .venv-skyrl once: SkyRL 0.3.0 and the versions of Megatron and transformers it trains with
	@scripts/setup_skyrl.sh

demo: setup   ## tiny checkpoint -> Megatron on 2 processes -> another layout -> back, compared bit for bit
	@.venv/bin/kimi-bridge demo

test: setup test-vllm   ## all tests that run without a GPU (GPU tests skip themselves)
	@.venv/bin/python -m pytest -q

test-vllm: setup-vllm   ## the tests that need the real vLLM, on a CPU
	@.venv-vllm/bin/python -m pytest -q tests/inference tests/patches \
		tests/multimodal/test_against_vllm.py tests/integrations/test_skyrl_install.py

test-skyrl: setup-skyrl   ## the tests that need the real SkyRL and Ray, on a CPU
	@.venv-skyrl/bin/python -m pytest -q tests/integrations

gpu-check: setup setup-vllm   ## on a GPU: load, train, export, serve, sync and compare, with the real widths
	@.venv/bin/python scripts/gpu_check.py

lint: setup   ## style, formatting and types
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy

clean:        ## remove the environments and the demo's output
	rm -rf .venv .venv-vllm .venv-skyrl .demo
