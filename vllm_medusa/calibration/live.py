"""Reaching into an engine that runs in this process."""

from __future__ import annotations

from typing import Any

from vllm_medusa.calibration.clock import StepClock


def model_runner(llm: Any) -> Any:
    """The model runner of vLLM's ``LLM`` (VLLM_ENABLE_V1_MULTIPROCESSING=0, one worker)."""
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


def step_clock(llm: Any) -> StepClock:
    """A clock that times the parts of every step of vLLM's ``LLM`` from now on (``time_parts``)."""
    device = llm.llm_engine.vllm_config.device_config.device_type
    clock = StepClock(on_cuda=device == "cuda")
    time_parts(clock, model_runner(llm))
    return clock


def time_parts(clock: StepClock, runner: Any) -> None:
    """Have a clock time the forward pass ("forward"), the target's LM head ("LM head") and what
    drafts ("drafting"), as far as they are there.

    Args:
        clock: which.
        runner: vLLM's V1 runner or its V2 runner (``vllm/v1/worker/gpu``), with Medusa or without.
    """
    clock.time(runner.model, "compute_logits", "LM head")
    if not hasattr(runner, "speculator"):
        clock.time(runner, "_model_forward", "forward")
        clock.time(runner, "propose_draft_token_ids", "drafting")
        return
    clock.time(runner.model, "forward", "forward")
    if runner.cudagraph_manager is not None:  # a full graph replays without the model
        clock.time(runner.cudagraph_manager, "run_fullgraph", "forward")
    if runner.speculator is not None:
        clock.time(runner.speculator, "propose", "drafting")


def set_tree_size(scheduler: Any, num_nodes: int) -> None:
    """Let the following steps draft so many nodes, whatever the batch size.

    Args:
        scheduler: vLLM's scheduler (``vllm/v1/core/sched/scheduler.py``) of an engine with Medusa.
        num_nodes: 0 to the size of the engine's tree.

    The drafts that are there already are still verified: the first step of the new size is the one
    after the next. What counts is the table that the scheduler made of the batch-size schedule;
    config.py always sets one. ``num_spec_tokens`` stays the most there can be, buffers depend on
    it.
    """
    if not 0 <= num_nodes <= scheduler.num_spec_tokens:
        raise ValueError(f"{num_nodes} nodes: the engine's tree has {scheduler.num_spec_tokens}")
    table = scheduler.dynamic_sd_lookup
    table[:] = [num_nodes] * len(table)
