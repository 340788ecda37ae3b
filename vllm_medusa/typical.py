"""Typical acceptance: drafts that the target finds likely enough pass for its own. Lossy.

A draft c behind a text is typical if

    p(c) > min(posterior_threshold, posterior_alpha * exp(-H(p)))

where p is the target's distribution there, after everything that changes it (temperature, top-k,
top-p, min-p, penalties, bias, masks), and H its entropy in nats (Medusa paper, arXiv 2401.10774,
section 2.3.1; after truncation sampling of Hewitt et al., arXiv 2210.15191). The bar is lower where
the target itself is undecided. A token of probability 0 is never typical.

The paper takes all paths whose every node is typical and keeps the longest. Here the rule is
part of the walk (``acceptance.py``), depth by depth: a token is drawn from p as ever; if it is no
child of the row, and some child is typical, the most probable typical child is taken in its place.
So

- a step goes on wherever the paper's rule would let it, and wherever the exact rule would;
- p is read along one path only, with the path's own penalties and masks, as in the exact walk;
- only draws that would have ended the path are replaced: what the target draws among the drafts
  stays, and less of its distribution is lost than by always taking the likeliest child;
- the last token of a path is still a draw from p, by vLLM's sampler.

What is given up is a longer path below a less likely child.
"""

from typing import NamedTuple

import torch

from vllm_medusa.acceptance import NO_TOKEN


class TypicalBars(NamedTuple):
    """The bar that a draft's probability has to pass; the paper's numbers."""

    threshold: float = 0.09
    """``posterior_threshold``, the highest bar, a probability."""
    alpha: float = 0.3
    """``posterior_alpha``, share of exp(-entropy) that is the bar where it is lower."""


def typical_tokens(
    probs: torch.Tensor,
    children: torch.Tensor,
    drawn: torch.Tensor,
    bars: TypicalBars,
) -> torch.Tensor:
    """What the walk goes on with at R rows.

    Args:
        probs: float32 [R, V], the target's distribution at each row.
        children: int64 [R, N], tokens of the row's children in any columns, else ``NO_TOKEN``.
        drawn: int64 [R], a token drawn from ``probs``.
        bars: what a child has to pass.

    Returns:
        int64 [R]: the drawn token, or a typical child.
    """
    is_child = children != NO_TOKEN
    entropy = torch.special.entr(probs).sum(dim=1, keepdim=True)
    bar = (bars.alpha * torch.exp(-entropy)).clamp(max=bars.threshold)
    chances = probs.gather(1, children.clamp(min=0)).masked_fill(~is_child, 0)
    best, column = chances.max(dim=1)
    likeliest = children.gather(1, column[:, None])[:, 0]
    was_drawn = (children == drawn[:, None]).any(dim=1)
    return torch.where(~was_drawn & (best > bar[:, 0]), likeliest, drawn)
