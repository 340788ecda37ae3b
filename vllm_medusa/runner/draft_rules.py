"""Rules of acceptance that look at the drafts, on vLLM's V2 model runner.

They choose tokens in the place of those that vLLM's sampler drew at the same rows. As there, noise
is keyed by a request's seed and a token's position.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_medusa.acceptance import NO_TOKEN
from vllm_medusa.keyed_noise import keyed_uniform
from vllm_medusa.sampled_drafts import DraftProbs, try_children
from vllm_medusa.typical import TypicalBars, typical_tokens

if TYPE_CHECKING:
    from vllm_medusa.runner.model_state import TreeModelState

CHANCES = 0  # of keyed noise; streams 1 to the depth of the tree are those of drafts


class DraftRule:
    """Leaves all tokens as they are.

    Attributes:
        applies_to: bool [max_num_reqs], by slot: the requests of a batch that the rule is for;
            None: no request of the batch.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.has_flashinfer = sampler.use_flashinfer
        self.applies_to: torch.Tensor | None = None

    def look_at(self, batch: InputBatch) -> None:
        """Note which requests of the batch the rule is for."""
        index = batch.idx_mapping_np
        chosen = np.zeros(self.sampler.req_states.max_num_reqs, dtype=bool)
        chosen[index] = self.is_for(batch, index)
        self.applies_to = None
        if chosen.any():
            self.applies_to = async_tensor_h2d(chosen, device=batch.idx_mapping.device)
        # A fused sampler keeps to itself what top-k and top-p leave of a distribution.
        self.sampler.use_flashinfer = self.has_flashinfer and self.applies_to is None

    def is_for(self, batch: InputBatch, index: np.ndarray) -> np.ndarray:
        """Whether the rule is for each request of the batch, bool [B]; ``index``: their slots."""
        return np.zeros(len(index), dtype=bool)

    def apply(
        self,
        drawn: torch.Tensor,
        logits: torch.Tensor,
        children: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Choose the tokens of R rows, int64 [R].

        Args:
            drawn: int64 [R], the sampler's tokens.
            logits: [R, V], that they were drawn from.
            children: int64 [R, N], tokens of each row's children, in the order of the tree; else
                ``NO_TOKEN``.
            slots: integers [R], of each row's request in the state.
            rows: int64 [R], in the request's tree.
            positions: integers [R], each row's position.
        """
        if self.applies_to is None or not children.shape[1]:
            return drawn
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        chosen = self.choose(drawn, probs, children, slots, rows, positions)
        return torch.where(self.applies_to[slots], chosen, drawn)

    def choose(
        self,
        drawn: torch.Tensor,
        probs: torch.Tensor,
        children: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """As ``apply``, for all rows; ``probs``: float32 [R, V]."""
        raise NotImplementedError


class TypicalRule(DraftRule):
    """May take a typical child in the place of the drawn token (``typical.py``)."""

    def __init__(self, sampler: Sampler, bars: TypicalBars) -> None:
        super().__init__(sampler)
        self.bars = bars

    def is_for(self, batch: InputBatch, index: np.ndarray) -> np.ndarray:
        return self.sampler.sampling_states.temperature.np[index] > 0

    def choose(
        self,
        drawn: torch.Tensor,
        probs: torch.Tensor,
        children: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        return typical_tokens(probs, children, drawn, self.bars)


class DrawnDraftsRule(DraftRule):
    """Draws anew, by way of the children, where these were drawn (``sampled_drafts.py``)."""

    def __init__(self, sampler: Sampler, state: "TreeModelState") -> None:
        super().__init__(sampler)
        self.state = state

    def is_for(self, batch: InputBatch, index: np.ndarray) -> np.ndarray:
        # What fills the nodes' places where the last token of a prompt is read was not drawn.
        return self.state.has_drawn[index] & ~batch.is_prefilling_np

    def choose(
        self,
        drawn: torch.Tensor,
        probs: torch.Tensor,
        children: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        assert self.state.drawn_from is not None
        draft = DraftProbs(*(values[slots, rows] for values in self.state.drawn_from))
        states = self.sampler.sampling_states
        chances = keyed_uniform(states.seeds.gpu[slots], positions, CHANCES, children.shape[1])
        accepted, left = try_children(probs, draft, children, chances)
        rest = gumbel_sample(
            left.log(),
            slots,
            states.temperature.gpu,
            states.seeds.gpu,
            positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        chosen = torch.where(accepted == NO_TOKEN, rest, accepted)
        has_children = (children != NO_TOKEN).any(dim=1)
        return torch.where(has_children, chosen, drawn)


def build_draft_rule(sampler: Sampler, state: "TreeModelState") -> DraftRule:
    """The rule that the configuration asks for."""
    if (bars := state.config.typical_bars) is not None:
        return TypicalRule(sampler, bars)
    if state.config.draft_sample_method != "greedy":
        return DrawnDraftsRule(sampler, state)
    return DraftRule(sampler)
