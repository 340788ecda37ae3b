"""Drafting on vLLM's V2 model runner: the heads as one of its speculators."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.logger import init_logger
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from vllm_medusa.acceptance import NO_TOKEN
from vllm_medusa.drafter import MedusaDrafter
from vllm_medusa.keyed_noise import keyed_exponential
from vllm_medusa.sampled_drafts import DraftSampling

if TYPE_CHECKING:
    from vllm_medusa.runner.model_state import TreeModelState

logger = init_logger(f"vllm.{__name__}")


def build_speculator(
    vllm_config: VllmConfig, device: torch.device, req_states: Any
) -> "MedusaSpeculator":
    """In the place of vLLM's ``init_speculator``."""
    if vllm_config.speculative_config.lookup:
        logger.info_once("Medusa: the V2 model runner drafts with the heads only, without lookup.")
    return MedusaSpeculator(vllm_config, device)


class MedusaSpeculator(BaseSpeculator):
    """Medusa heads: no cache of their own, one draft per request from its last hidden state."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        self.drafter = MedusaDrafter(vllm_config, device)
        self.num_nodes = len(self.drafter.tree)

    def load_model(self, target: nn.Module, state: "TreeModelState") -> None:
        """Load the heads for a loaded target."""
        self.drafter.load_model(target)
        self.state = state
        state.keep_drawn_from(self.drafter.num_candidates)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """Nothing to do: drafting is a few products, run without a graph."""

    def capture(self) -> None:
        """Nothing to do."""

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        *unused: Any,
        num_speculative_tokens: int | None = None,
        **also_unused: Any,
    ) -> torch.Tensor:
        """Draft for every request of the batch; those that are still read get drafts that nobody
        schedules.

        Returns:
            int64 [B, nodes]; ``NO_TOKEN`` behind the first ``num_speculative_tokens``.
        """
        num_requests = input_batch.num_reqs
        slots, slots_np = input_batch.idx_mapping, input_batch.idx_mapping_np
        drafts = last_sampled.new_full((num_requests, self.num_nodes), NO_TOKEN)
        num_nodes = self.num_nodes if num_speculative_tokens is None else num_speculative_tokens
        is_drawing = self.state.is_drawing[slots_np] & (num_nodes > 0)
        self.state.has_drawn[slots_np] = is_drawing
        if not num_nodes:
            return drafts
        # The last rows of a request are those with logits.
        ends = input_batch.query_start_loc[1 : num_requests + 1]
        rows = (ends - input_batch.cu_num_logits[: num_requests + 1].diff()).long()
        if input_batch.num_draft_tokens:
            rows = rows + self.state.last_rows[:num_requests]
        states, roots = last_hidden_states[rows], last_sampled[slots, 0]
        if not is_drawing.any():
            drafts[:, :num_nodes] = self.drafter.propose(states, roots, num_nodes)
            return drafts
        places = async_tensor_h2d(np.flatnonzero(~is_drawing), device=drafts.device)
        if len(places):
            best = self.drafter.propose(states[places], roots[places], num_nodes)
            drafts[places, :num_nodes] = best
        places = async_tensor_h2d(np.flatnonzero(is_drawing), device=drafts.device)
        slots = slots[places]
        drafts[places, :num_nodes] = self._draw(
            states[places], roots[places], num_nodes, slots, temperature[slots], seeds[slots],
            input_batch.positions[rows[places]],
        )  # fmt: skip
        return drafts

    def _draw(
        self,
        states: torch.Tensor,
        roots: torch.Tensor,
        num_nodes: int,
        slots: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Drafts that are drawn, int64 [R, num_nodes], for R requests; notes what from.

        Args:
            states: [R, hidden], as ``MedusaDrafter.propose_drawn`` takes them.
            roots: int64 [R], likewise.
            num_nodes: how many nodes.
            slots: integers [R], of the requests in the state.
            temperature: float32 [R].
            seeds: int64 [R].
            positions: integers [R], where the roots were drawn.
        """
        limits = self.state.sampling_states
        sampling = DraftSampling(temperature, limits.top_k.gpu[slots], limits.top_p.gpu[slots])

        def noise(depth: int, shape: tuple[int, ...]) -> torch.Tensor:
            numbers = keyed_exponential(seeds, positions, depth, math.prod(shape[1:]))
            return numbers.view(shape)

        drafts, drawn_from = self.drafter.propose_drawn(states, roots, num_nodes, sampling, noise)
        assert self.state.drawn_from is not None
        for kept, new in zip(self.state.drawn_from, drawn_from, strict=True):
            kept[slots, : 1 + num_nodes] = new
        return drafts
