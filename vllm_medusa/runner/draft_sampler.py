"""The last step of vLLM's V1 sampler, for rules that look at the drafts.

Everything before it (penalties, bias, masks, temperature, min-p) and behind it (greedy requests,
logprobs of the token that was taken) stays vLLM's.
"""

from typing import Any

import torch
from torch import nn
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_medusa.typical import typical_tokens


class TypicalSampler(nn.Module):
    """In the place of ``Sampler.topk_topp_sampler``: draws, and may take a typical child instead.

    Attributes:
        children: int64 [B, N], tokens of the children of the rows that are drawn at next, else
            ``NO_TOKEN``; None: the rows have none.
    """

    def __init__(self, stock: nn.Module, posterior_threshold: float, posterior_alpha: float):
        """``stock``: what vLLM would draw with; for the others see ``typical.py``."""
        super().__init__()
        self.stock = stock
        self.posterior_threshold = posterior_threshold
        self.posterior_alpha = posterior_alpha
        self.children: torch.Tensor | None = None

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
        probs = logits.softmax(dim=-1)
        drawn, for_logprobs = self.stock(logits, generators, None, None)
        tokens = typical_tokens(
            probs, self.children, drawn, self.posterior_threshold, self.posterior_alpha
        )
        return tokens, for_logprobs
