"""Adapter to vLLM's V2 model runner (``vllm/v1/worker/gpu/model_runner.py``).

In the order of a step: the drafts of the last step arrive as scheduled tokens with linear slots and
positions; the model state turns positions into depth positions and tells the attention of the trees
(model_state.py); after the forward pass the trees are walked with tokens drawn by vLLM's own
sampler (tree_sampler.py), the accepted path is compacted, and the heads draft the next trees
(speculator.py). No step waits for the device, so asynchronous scheduling stays on.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

from vllm_medusa.attention.backends import slot_mover, tree_attention
from vllm_medusa.attention.layers import check_attention_layers, check_one_group
from vllm_medusa.runner.model_state import build_model_state
from vllm_medusa.runner.speculator import build_speculator

logger = init_logger(f"vllm.{__name__}")


class TreeModelRunner(model_runner.GPUModelRunner):
    """vLLM's runner with token trees; on CPUs mixed into its subclass for them."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        with _in_place_of("init_speculator", build_speculator):
            super().__init__(vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with (
            tree_attention(self.vllm_config),
            _in_place_of("init_model_state", build_model_state),
        ):
            super().load_model(*args, **kwargs)
        check_attention_layers(self.compilation_config.static_forward_context)
        self.speculator.load_model(self.model, self.model_state)
        # vLLM plans the key-value cache's memory with it.
        heads = self.speculator.drafter.heads
        tensors = [*heads.parameters(), *heads.buffers()]
        self.model_memory_usage += sum(tensor.nbytes for tensor in tensors)

    def initialize_kv_cache(
        self, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        check_one_group(kv_cache_config)
        super().initialize_kv_cache(kv_cache_config, is_profiling, *args, **kwargs)
        if is_profiling:  # a small cache, soon freed
            return
        self.model_state.mover = slot_mover(self.attn_groups, self.kv_caches)
        self.model_state.warm_up()
        if not self.model_config.enforce_eager:
            self._log_graphs()

    def _dummy_sampler_run(self, hidden_states: torch.Tensor) -> None:
        # What vLLM takes the memory of: one row per request. Trees have more.
        rows = min(self.max_num_reqs * self.decode_query_len, self.max_num_tokens)
        logits = self.model.compute_logits(hidden_states.new_zeros(rows, hidden_states.shape[1]))
        if logits is not None:
            logits = logits[: get_max_chunk_logits(self.vocab_size)].to(torch.float32, copy=True)
        del logits
        super()._dummy_sampler_run(hidden_states)

    def _log_graphs(self) -> None:
        mode = self.cudagraph_manager.cudagraph_mode
        if mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL:
            schedule = self.speculative_config.num_speculative_tokens_per_batch_size
            rows = sorted({1 + nodes for _, _, nodes in schedule})
            logger.info_once(
                "Medusa: batches of trees alone run in full CUDA graphs (%s rows a request, up to "
                "%s in all: --max-cudagraph-capture-size), batches with prompts in %s ones.",
                " or ".join(map(str, rows)),
                self.compilation_config.max_cudagraph_capture_size,
                mode.mixed_mode().name.lower(),
            )  # fmt: skip
        else:
            logger.info_once("Medusa: trees run in CUDA graphs of mode %s.", mode.name)


@contextmanager
def _in_place_of(name: str, replacement: Any) -> Iterator[None]:
    """Have vLLM's runner call ours where it names one of its own functions."""
    stock = getattr(model_runner, name)
    setattr(model_runner, name, replacement)
    try:
        yield
    finally:
        setattr(model_runner, name, stock)
