"""Rules of acceptance that look at the drafts, on vLLM's V2 model runner.

They choose tokens in the place of those that vLLM's sampler drew at the same rows. As there, noise
is keyed by a request's seed and a token's position.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
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
    """For no request."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def is_for(self, batch: InputBatch) -> np.ndarray:
        """Whether the rule is for each request of a batch, bool [B]."""
        return np.zeros(batch.num_reqs, dtype=bool)

    def choose(
        self,
        drawn: torch.Tensor,
        logits: torch.Tensor,
        children: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Choose the tokens of R rows of such requests, int64 [R].

        Args:
            drawn: int64 [R], the sampler's tokens.
            logits: [R, V], that they were drawn from.
            children: int64 [R, N], tokens of each row's children, in the order of the tree; else
                ``NO_TOKEN``.
            slots: integers [R], of each row's request in the state.
            rows: int64 [R], in the request's tree.
            positions: integers [R], each row's position.
        """
        raise NotImplementedError


class TypicalRule(DraftRule):
    """May take a typical child in the place of the drawn token (``typical.py``)."""

    def __init__(self, sampler: Sampler, bars: TypicalBars) -> None:
        super().__init__(sampler)
        self.bars = bars

    def is_for(self, batch: InputBatch) -> np.ndarray:
        return self.sampler.sampling_states.temperature.np[batch.idx_mapping_np] > 0

    def choose(
        self,
        drawn: torch.Tensor,
        logits: torch.Tensor,
        children: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        return typical_tokens(probs, children, drawn, self.bars)


class DrawnDraftsRule(DraftRule):
    """Draws anew, by way of the children, where these were drawn (``sampled_drafts.py``)."""

    def __init__(self, sampler: Sampler, state: "TreeModelState") -> None:
        super().__init__(sampler)
        self.state = state

    def is_for(self, batch: InputBatch) -> np.ndarray:
        # What fills the nodes' places where the last token of a prompt is read was not drawn.
        return self.state.has_drawn[batch.idx_mapping_np] & ~batch.is_prefilling_np

    def choose(
        self,
        drawn: torch.Tensor,
        logits: torch.Tensor,
        children: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        if not children.shape[1]:
            return drawn
        assert self.state.drawn_from is not None
        draft = DraftProbs(*(values[slots, rows] for values in self.state.drawn_from))
        states = self.sampler.sampling_states
        chances = keyed_uniform(states.seeds.gpu[slots], positions, CHANCES, children.shape[1])
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        accepted, left = try_children(probs, draft, children, chances)
        rest = gumbel_sample(
            left.log_(),
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
