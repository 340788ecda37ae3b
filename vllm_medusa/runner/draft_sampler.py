"""The last step of vLLM's V1 sampler, for rules of acceptance that look at the drafts.

They stand in the place of ``Sampler.topk_topp_sampler``. Everything before it (penalties, bias,
masks, temperature, min-p) and behind it (greedy requests, logprobs of the token that was taken)
stays vLLM's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_medusa.acceptance import NO_TOKEN
from vllm_medusa.sampled_drafts import (
    DraftProbs,
    draw_distinct,
    exponential,
    try_children,
    uniform,
)
from vllm_medusa.typical import TypicalBars, typical_tokens


class DraftSampler(nn.Module):
    """Draws as vLLM does where rows have no children.

    Attributes:
        children: int64 [B, N], tokens of the children of the rows that are drawn at next, else
            ``NO_TOKEN``; None: the rows have none.
        draft_probs: what these were drawn from, of shape [C], by place in the batch; of requests
            whose drafts were drawn, and that are still on their way.
    """

    def __init__(self, stock: nn.Module) -> None:
        """``stock``: what vLLM would draw with."""
        super().__init__()
        self.stock = stock
        self.children: torch.Tensor | None = None
        self.draft_probs: Mapping[int, DraftProbs] = {}

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Any]:
        """As vLLM's: [B, V] -> tokens, int64 [B], and what logprobs are made of, if anything."""
        if self.children is None or not self.children.shape[1]:
            return self.stock(logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        drawn, for_logprobs = self.stock(logits, generators, None, None)
        return self.choose(logits, drawn.long(), self.children, generators), for_logprobs

    def choose(
        self,
        logits: torch.Tensor,
        drawn: torch.Tensor,
        children: torch.Tensor,
        generators: dict[int, torch.Generator],
    ) -> torch.Tensor:
        """Choose the tokens, int64 [B], given vLLM's draws from logits that nothing more is done
        to."""
        raise NotImplementedError

    def forget(self) -> None:
        """Know of no drafts, until the next walk."""
        self.children, self.draft_probs = None, {}


class TypicalSampler(DraftSampler):
    """May take a typical child in the place of the drawn token (``typical.py``)."""

    def __init__(self, stock: nn.Module, bars: TypicalBars) -> None:
        super().__init__(stock)
        self.bars = bars

    def choose(
        self,
        logits: torch.Tensor,
        drawn: torch.Tensor,
        children: torch.Tensor,
        generators: dict[int, torch.Generator],
    ) -> torch.Tensor:
        return typical_tokens(logits.softmax(dim=-1), children, drawn, self.bars)


class DrawnDraftsSampler(DraftSampler):
    """Draws anew, by way of the children, where these were drawn (``sampled_drafts.py``)."""

    def choose(
        self,
        logits: torch.Tensor,
        drawn: torch.Tensor,
        children: torch.Tensor,
        generators: dict[int, torch.Generator],
    ) -> torch.Tensor:
        requests = list(self.draft_probs)
        if not requests:
            return drawn
        own = {row: generators[i] for row, i in enumerate(requests) if i in generators}
        draft = DraftProbs(*map(torch.stack, zip(*self.draft_probs.values(), strict=True)))
        target = logits[requests].softmax(dim=-1)
        children = children[requests]
        chances = uniform(tuple(children.shape), own, logits.device)
        accepted, left = try_children(target, draft, children, chances)
        noise = exponential(tuple(left.shape), own, logits.device)
        rest = draw_distinct(left, 1, noise)[:, 0]
        drawn[requests] = torch.where(accepted == NO_TOKEN, rest, accepted)
        return drawn


def build_draft_sampler(config: Any, stock: nn.Module) -> DraftSampler | None:
    """The sampler that a ``MedusaSpeculativeConfig`` asks for; None: vLLM's own."""
    if config.rejection_sample_method == "typical":
        return TypicalSampler(stock, config.typical_bars)
    if config.draft_sample_method != "greedy":
        return DrawnDraftsSampler(stock)
    return None
