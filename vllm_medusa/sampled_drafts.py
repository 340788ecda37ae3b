"""Sampled drafts: children drawn from the heads' distribution, and the exact rule for them.

With fixed drafts (the heads' best tokens) the exact walk of ``acceptance.py`` accepts a child with
the target's probability of it. Drafts may be drawn at random instead: the children of a row, one
after the other without replacement, from the head's distribution q at the request's temperature.
Then they are tried in that order. Child c is accepted with probability min(1, p(c) / q(c)); if it
is not, p becomes max(0, p - q), q loses c, both are normalised, and the next child is tried. Behind
the last one a token is drawn from what p has become. Each token is then distributed as the target's
p (speculative sampling, Leviathan et al., arXiv 2211.17192; with several drafts from one place
Miao et al., arXiv 2305.09781, and without replacement Jeon et al., arXiv 2402.14160).

The rule is exact only if nothing but chance decided which drafts are there. A cut by number is
harmless; where drafts are left out because of their tokens (grammars), fixed drafts must be used.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from vllm_medusa.acceptance import NO_TOKEN


class DrawnTree(NamedTuple):
    """What the drafts of one request's tree were drawn from; P distributions over the draft
    vocabulary of D tokens, the target's has V."""

    probs: torch.Tensor
    """float32 [P, D]."""
    places: torch.Tensor
    """int64 [1 + nodes]: for each row that has children which of ``probs`` they were drawn from."""
    token_ids: torch.Tensor
    """int64 [D], ids in the target's vocabulary."""

    def at(self, row: int, vocab_size: int) -> torch.Tensor:
        """float32 [V]: the distribution of the children of a row."""
        probs = self.probs[self.places[row]]
        return probs.new_zeros(vocab_size).index_copy_(0, self.token_ids, probs)


def draw_distinct(
    probs: torch.Tensor, number: int, generators: Mapping[int, torch.Generator]
) -> torch.Tensor:
    """Draw tokens without replacement, in the order in which they are drawn.

    The largest of p / e, with e exponential noise, is a draw from p, the next one a draw from what
    is left, and so on (Gumbel top-k: Kool et al., arXiv 1903.06059).

    Args:
        probs: float32 [B, ..., D], need not be normalised.
        number: how many.
        generators: those of requests (0 to B - 1) that have one of their own.

    Returns:
        int64 [B, ..., number]. Behind the last token of positive probability come others.
    """
    noise = torch.empty_like(probs).exponential_()
    for request, generator in generators.items():
        noise[request].exponential_(generator=generator)
    # Not 0, by which 0 / 0 would come out largest.
    return (probs / noise.clamp_(min=torch.finfo(noise.dtype).tiny)).topk(number, dim=-1).indices


def accept_drawn(
    target: torch.Tensor,
    draft: torch.Tensor,
    children: torch.Tensor,
    generators: Mapping[int, torch.Generator],
) -> torch.Tensor:
    """Draw a token from the target at R rows, by way of their children.

    Args:
        target: float32 [R, V], the target's distribution p at each row.
        draft: float32 [R, V], the distribution q that the row's children were drawn from.
        children: int64 [R, N], their tokens in the order in which they were drawn, in any columns;
            ``NO_TOKEN`` elsewhere.
        generators: those of rows (0 to R - 1) whose requests have one of their own.

    Returns:
        int64 [R]: the first child that was accepted, else a token drawn from what was left of p.
    """
    chances = torch.rand(children.shape, device=target.device)
    for row, generator in generators.items():
        chances[row] = torch.rand(chances.shape[1], generator=generator, device=target.device)
    accepted = torch.full_like(target[:, 0], NO_TOKEN, dtype=torch.int64)
    for column in range(children.shape[1]):
        token = children[:, column]
        is_tried = (token != NO_TOKEN) & (accepted == NO_TOKEN)
        if not is_tried.any():
            continue
        place = token.clamp(min=0)[:, None]
        p, q = target.gather(1, place)[:, 0], draft.gather(1, place)[:, 0]
        # Where all that q allows has been drawn, the next child was not drawn from it: no child.
        is_tried &= q > 0
        passes = is_tried & (chances[:, column] * q < p)
        accepted = torch.where(passes, token, accepted)
        fails = (is_tried & ~passes)[:, None]
        target = torch.where(fails, _normalised((target - draft).clamp(min=0), target), target)
        draft = torch.where(fails, _normalised(draft.scatter(1, place, 0), draft * 0), draft)
    drawn = draw_distinct(target, 1, generators)[:, 0]
    return torch.where(accepted == NO_TOKEN, drawn, accepted)


def _normalised(weights: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Rows that sum to 1; where nothing is left (p = q, but for rounding), those of another
    tensor."""
    total = weights.sum(dim=1, keepdim=True)
    return torch.where(
        total > 0, weights / total.clamp(min=torch.finfo(total.dtype).tiny), otherwise
    )
