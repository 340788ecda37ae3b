"""Rules of acceptance that look at the drafts, on vLLM's V2 model runner.

They choose tokens in the place of those that vLLM's sampler drew at the same rows. As there, noise
is keyed by a request's seed and a token's position.
"""

from typing import TYPE_CHECKING, NamedTuple

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


class DrawnRows(NamedTuple):
    """R rows that tokens were drawn at."""

    drawn: torch.Tensor
    """int64 [R], the sampler's tokens."""
    logits: torch.Tensor
    """[R, V], that they were drawn from."""
    children: torch.Tensor
    """int64 [R, N], tokens of each row's children, in the order of the tree; else ``NO_TOKEN``."""
    slots: torch.Tensor
    """integers [R], of each row's request in the state."""
    rows: torch.Tensor
    """int64 [R], in the request's tree."""
    positions: torch.Tensor
    """integers [R], each row's position."""

    def probs(self) -> torch.Tensor:
        """float32 [R, V]: the target's distributions."""
        return self.logits.softmax(dim=-1, dtype=torch.float32)


class DraftRule:
    """For no request."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def is_for(self, batch: InputBatch) -> np.ndarray:
        """Whether the rule is for each request of a batch, bool [B]."""
        return np.zeros(batch.num_reqs, dtype=bool)

    def choose(self, at: DrawnRows) -> torch.Tensor:
        """Choose the tokens of R rows of such requests, int64 [R]."""
        raise NotImplementedError


class TypicalRule(DraftRule):
    """May take a typical child in the place of the drawn token (``typical.py``)."""

    def __init__(self, sampler: Sampler, bars: TypicalBars) -> None:
        super().__init__(sampler)
        self.bars = bars

    def is_for(self, batch: InputBatch) -> np.ndarray:
        return self.sampler.sampling_states.temperature.np[batch.idx_mapping_np] > 0

    def choose(self, at: DrawnRows) -> torch.Tensor:
        return typical_tokens(at.probs(), at.children, at.drawn, self.bars)


class DrawnDraftsRule(DraftRule):
    """Draws anew, by way of the children, where these were drawn (``sampled_drafts.py``)."""

    def __init__(self, sampler: Sampler, state: "TreeModelState") -> None:
        super().__init__(sampler)
        self.state = state

    def is_for(self, batch: InputBatch) -> np.ndarray:
        # What fills the nodes' places where the last token of a prompt is read was not drawn.
        return self.state.has_drawn[batch.idx_mapping_np] & ~batch.is_prefilling_np

    def choose(self, at: DrawnRows) -> torch.Tensor:
        assert self.state.drawn_from is not None
        draft = DraftProbs(*(values[at.slots, at.rows] for values in self.state.drawn_from))
        states = self.sampler.sampling_states
        seeds = states.seeds.gpu[at.slots]
        chances = keyed_uniform(seeds, at.positions, CHANCES, at.children.shape[1])
        accepted, left = try_children(at.probs(), draft, at.children, chances)
        rest = gumbel_sample(
            left.log_(),
            at.slots,
            states.temperature.gpu,
            states.seeds.gpu,
            at.positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        chosen = torch.where(accepted == NO_TOKEN, rest, accepted)
        has_children = (at.children != NO_TOKEN).any(dim=1)
        return torch.where(has_children, chosen, at.drawn)


def build_draft_rule(sampler: Sampler, state: "TreeModelState") -> DraftRule:
    """The rule that the configuration asks for."""
    if (bars := state.config.typical_bars) is not None:
        return TypicalRule(sampler, bars)
    if state.config.draft_sample_method != "greedy":
        return DrawnDraftsRule(sampler, state)
    return DraftRule(sampler)
