# Everything runs in .venv, which the first target that needs it makes (ci/setup.sh).

PYTHON_VENV := .venv/bin/python
# vLLM on a CPU wants its libraries preloaded and its threads bound before Python starts.
CPU_ENV := eval "$$($(PYTHON_VENV) -m vllm_medusa.cpu_setup --print-env)"
MODEL = $$($(PYTHON_VENV) -m vllm_medusa.demo.model)
HEADS ?= heads/smollm2-135m-instruct
PORT ?= 8000

.PHONY: help
help: ## list the targets
	@echo "Targets (each makes .venv first if it is not there):"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

.PHONY: setup
setup: ## make .venv and install everything into it
	@ci/setup.sh

.PHONY: demo
demo: setup ## serve SmolLM2-135M-Instruct with Medusa, chat, and measure it against plain vLLM
	@$(CPU_ENV) && $(PYTHON_VENV) -m vllm_medusa.cli.main demo $(ARGS)

.PHONY: serve
serve: setup ## serve the demo model with Medusa on PORT until Ctrl-C
	@$(CPU_ENV) && exec .venv/bin/vllm serve "$(MODEL)" --served-model-name smollm2 \
		--speculative-model "medusa:$(HEADS)" --dtype float32 --max-model-len 2048 --port $(PORT)

.PHONY: test
test: setup ## run the tests
	@$(CPU_ENV) && $(PYTHON_VENV) -m pytest tests/unit tests/integration tests/e2e $(ARGS)

.PHONY: lint
lint: setup ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

.PHONY: clean
clean: ## remove everything that make made, the virtual environment too
	rm -rf .venv .cache build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
