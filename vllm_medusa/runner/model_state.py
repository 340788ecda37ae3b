"""What trees add to a target's state on vLLM's V2 model runner.

vLLM asks its ``ModelState`` for the inputs and the attention metadata of every step. Ours is the
target's own class with the trees mixed in: depth positions, which rows are trees, and what has to
happen to the key-value cache once paths are accepted. All of it lies in buffers that keep their
place, so that CUDA graphs see it.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states import resolve_model_state_cls
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState, use_penalty
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_medusa.acceptance import AcceptedPaths
from vllm_medusa.acceptance_kernel import walk_drawn_tokens
from vllm_medusa.bank import TreeBank
from vllm_medusa.keyed_noise import keyed_uniform
from vllm_medusa.runner.tree_sampler import TreeSampler
from vllm_medusa.sampled_drafts import DraftProbs, draws_drafts
from vllm_medusa.tree import TokenTree

BUILT_IN_RULES = (LogitBiasState, PenaltiesState, BadWordsState)


def build_model_state(
    vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device
) -> "TreeModelState":
    """The target's model state with trees; in the place of vLLM's ``init_model_state``.

    Raises:
        ValueError: in vLLM's words: the target's state would ignore prompt embeddings.
    """
    own = resolve_model_state_cls(vllm_config, model)
    if vllm_config.model_config.enable_prompt_embeds and not own.supports_prompt_embeds:
        raise ValueError(f"--enable-prompt-embeds not supported with {own.__name__}.")
    cls = type(f"Tree{own.__name__}", (TreeModelState, own), {})
    return cls(vllm_config, model, encoder_cache, device)


class TreeModelState(ModelState):
    """Mixed into the target's own ``ModelState``.

    Attributes:
        tree_of: int64 [max_num_reqs], by slot: each request's tree in the bank.
        tree_index: int32 [max_num_reqs], by place in the batch: the tree, or -1 where rows are a
            piece of a prompt.
        looks_back: bool [max_num_reqs], by slot, on the host: rules look back at the text.
        last_rows: int64 [max_num_reqs], by place in the batch: row where the newest token was
            drawn, counted from the request's first row of logits.
        num_steps: depth of the deepest tree, and one.
        is_drawing: bool [max_num_reqs], by slot, on the host: drafts are drawn from the heads.
        has_drawn: likewise: and the newest ones were.
        drawn_from: what they were drawn from, by slot and row, [max_num_reqs, rows, candidates].
    """

    def __init__(
        self, vllm_config: VllmConfig, model: nn.Module, encoder_cache: Any, device: torch.device
    ) -> None:
        super().__init__(vllm_config, model, encoder_cache, device)
        self.config = vllm_config.speculative_config
        tree: TokenTree = self.config.token_tree
        size = self.max_num_reqs
        self.bank = TreeBank([tree], device)
        self.num_steps = tree.depth + 1
        self.tree_of = torch.zeros(size, dtype=torch.int64, device=device)
        self.tree_index = torch.zeros(size, dtype=torch.int32, device=device)
        self.last_rows = torch.zeros(size, dtype=torch.int64, device=device)
        self.looks_back = np.zeros(size, dtype=bool)
        self.is_drawing = np.zeros(size, dtype=bool)
        self.has_drawn = np.zeros(size, dtype=bool)
        self.drawn_from: DraftProbs | None = None
        self.has_custom_rules = False
        self.slots: torch.Tensor | None = None
        self.mover: Any = None

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        """Note what a request's rules ask for."""
        super().add_request(req_index, new_req_data)
        params: SamplingParams = new_req_data.sampling_params
        self.looks_back[req_index] = self.has_custom_rules or (
            use_penalty(params)
            or bool(params.bad_words_token_ids)
            or params.thinking_token_budget is not None
        )
        self.is_drawing[req_index] = draws_drafts(self.config.draft_sample_method, params)
        self.has_drawn[req_index] = False

    # -- before the forward pass -------------------------------------------------------------------

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Any,
        *args: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Tell the builders of attention metadata which rows are trees."""
        self.slots = slot_mappings[0]
        tree_index = self._set_trees(input_batch, for_capture)
        for groups in attn_groups:
            for group in groups:
                for builder in group.metadata_builders:
                    builder.set_trees(tree_index, self.bank.ancestors)
        return super().prepare_attn(
            input_batch,
            cudagraph_mode,
            block_tables,
            slot_mappings,
            attn_groups,
            *args,
            for_capture=for_capture,
            **kwargs,
        )

    def _set_trees(self, batch: InputBatch, for_capture: bool) -> torch.Tensor | None:
        """Fill ``tree_index`` for a batch, and return its part; None where no request has nodes."""
        size = batch.num_reqs_after_padding
        if for_capture:
            # Graphs are captured for batches of one token per request, and for those of a whole
            # tree: which one this is, its shape says.
            if batch.num_tokens == batch.num_reqs:
                return None
            self.tree_index[:size] = 0
            return self.tree_index[:size]
        if not batch.num_draft_tokens:
            return None
        trees = self.tree_of[batch.idx_mapping].to(torch.int32)
        if batch.has_prefill:
            # One new token over a context, with placeholders in the nodes' places, runs as a tree
            # does: whatever the placeholders hold are guesses like any other.
            is_chunk = batch.is_prefilling_np & ~batch.prefill_runs_as_decode_np
            is_chunk_gpu = async_tensor_h2d(is_chunk, device=trees.device)
            trees = trees.masked_fill(is_chunk_gpu, -1)
        self.tree_index[: batch.num_reqs] = trees
        return self.tree_index[:size]

    def prepare_inputs(self, input_batch: InputBatch, req_states: Any) -> dict[str, Any]:
        """Turn the linear positions of nodes into depth positions, once vLLM has computed their
        slots; in place, in the buffer that the forward pass (and its CUDA graphs) reads."""
        if input_batch.num_draft_tokens:
            trees = self.tree_of[input_batch.expanded_idx_mapping]
            offsets = self.bank.depth_offset[trees, input_batch.expanded_local_pos.long()]
            input_batch.positions.index_add_(0, input_batch.logits_indices, offsets)
        return super().prepare_inputs(input_batch, req_states)

    # -- acceptance and compaction -----------------------------------------------------------------

    def custom_sampler(self, sampler: Sampler) -> tuple[Sampler, TreeSampler]:
        """vLLM's sampler, and ours for steps with trees."""
        # Custom processors, named in the configuration or installed, may look at anything.
        self.has_custom_rules = not all(
            isinstance(processor, BUILT_IN_RULES) for processor in sampler.logits_processors
        )
        self.sampling_states = sampler.sampling_states
        return sampler, TreeSampler(sampler, self)

    def keep_drawn_from(self, num_candidates: int) -> None:
        """Have room for what drafts are drawn from, if they are."""
        if self.config.draft_sample_method == "greedy":
            return
        shape = (self.max_num_reqs, 1 + len(self.config.token_tree), num_candidates)
        self.drawn_from = DraftProbs(
            torch.zeros(shape, device=self.device),
            torch.zeros(shape, dtype=torch.int64, device=self.device),
        )

    def warm_up(self) -> None:
        """Compile the walk before the first request needs it; vLLM's own warm-up takes the way of
        requests whose rules look back."""
        one, trees = torch.zeros(1, dtype=torch.int64, device=self.device), self.tree_of[:1]
        ends = torch.arange(2, dtype=torch.int32, device=self.device)
        walk_drawn_tokens(one, one.int(), ends, trees, self.bank.parents, self.num_steps)
        if self.drawn_from is not None:
            keyed_uniform(one, one.int(), stream=1, count=2)

    def keep(self, paths: AcceptedPaths, input_batch: InputBatch) -> None:
        """Compact the accepted paths, and remember where they end."""
        assert self.slots is not None
        self.last_rows[: input_batch.num_reqs] = paths.last_rows
        roots = input_batch.logits_indices[input_batch.cu_num_logits[:-1].long()]
        self.mover.move(paths, self.slots, roots)
