"""Sampled drafts: children drawn from the heads' distribution, and the exact rule for them.

With fixed drafts (the heads' best tokens) the exact walk of ``acceptance.py`` accepts a child with
the target's probability of it. Drafts may be drawn at random instead: the children of a row, one
after the other without replacement, from the head's distribution q at the request's temperature.
Then they are tried in that order. Child c is accepted with probability min(1, p(c) / q(c)); if it
is not, p becomes max(0, p - q), q loses c, both are normalised, and the next child is tried. Behind
the last one a token is drawn from what p has become. Each token is then distributed as the target's
p (speculative sampling, Leviathan et al., arXiv 2211.17192; with several drafts from one place
Miao et al., arXiv 2305.09781, and without replacement Jeon et al., arXiv 2402.14160).

The rule is exact for any q, as long as it is the one that drafts were drawn from. So q is cut off
behind the head's best tokens, its candidates, and by the request's own top-k and top-p: what a head
thinks of other tokens is seldom what the target does.

It is exact only if nothing but chance decided which drafts are there. A cut by number is harmless;
where drafts are left out because of their tokens (grammars), fixed drafts must be used.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from vllm_medusa.acceptance import NO_TOKEN

NUM_CANDIDATES = 128

# From this temperature on drawn drafts are accepted more often than the heads' best tokens
# (docs/draft-sampling.md).
MIN_DRAWN_TEMPERATURE = 1.0


class DraftProbs(NamedTuple):
    """What children are drawn from: a distribution over C candidates, best first."""

    probs: torch.Tensor
    """float32 [..., C]."""
    token_ids: torch.Tensor
    """int64 [..., C], different ones; ids in the target's vocabulary."""


class DraftSampling(NamedTuple):
    """How B requests sample, as far as their drafts are concerned."""

    temperature: torch.Tensor
    """float32 [B]; 0 counts as 1: whoever asks leaves such requests out of account."""
    top_k: torch.Tensor
    """integers [B]; the size of the vocabulary: all."""
    top_p: torch.Tensor
    """float32 [B]."""


def draws_drafts(method: str, params: Any) -> bool:
    """Whether a request's drafts are drawn from the heads.

    Args:
        method: the configuration's ``draft_sample_method``.
        params: ``SamplingParams`` of the request.
    """
    if params.temperature == 0 or params.structured_outputs is not None:
        return False  # a grammar leaves drafts out because of their tokens
    if method == "auto":
        # With fixed drafts a seed's text is that without speculation.
        return params.seed is None and params.temperature >= MIN_DRAWN_TEMPERATURE
    return method == "probabilistic"


def draft_probs(logits: torch.Tensor, sampling: DraftSampling) -> torch.Tensor:
    """The distribution that a head's best tokens are drawn from, float32 [B, P, C].

    Args:
        logits: [B, P, C], those of the candidates, best first.
        sampling: of the B requests.
    """
    temperature, top_k, top_p = (values[:, None, None] for values in sampling)
    probs = (logits.float() / torch.where(temperature > 0, temperature, 1.0)).softmax(dim=-1)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    # The best token always stays, as everywhere in vLLM.
    is_in = (ranks < top_k) & (probs.cumsum(dim=-1) - probs < top_p) | (ranks == 0)
    probs = probs * is_in
    return probs / probs.sum(dim=-1, keepdim=True)


def draw_distinct(probs: torch.Tensor, number: int, noise: torch.Tensor) -> torch.Tensor:
    """Draw without replacement, in the order in which they are drawn.

    The largest of p / e, with e exponential noise, is a draw from p, the next one a draw from what
    is left, and so on (Gumbel top-k: Kool et al., arXiv 1903.06059).

    Args:
        probs: float32 [..., C], need not be normalised.
        number: how many.
        noise: float32 [..., C], exponential.

    Returns:
        Columns, int64 [..., number]. Behind the last one of positive probability come others.
    """
    # Not 0, by which 0 / 0 would come out largest.
    return (probs / noise.clamp(min=torch.finfo(noise.dtype).tiny)).topk(number, dim=-1).indices


def try_children(
    target: torch.Tensor, draft: DraftProbs, children: torch.Tensor, chances: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Try the children of R rows.

    Args:
        target: float32 [R, V], the target's distribution p at each row.
        draft: of shape [R, C], the distribution q that the row's children were drawn from.
        children: int64 [R, N], their tokens in the order in which they were drawn, in any columns;
            ``NO_TOKEN`` elsewhere.
        chances: float32 [R, N], uniform in [0, 1).

    Returns:
        int64 [R], the first child that was accepted, else ``NO_TOKEN``; and what is left of p, to
        draw a token from in that case, float32 [R, V].
    """
    q, ids = draft
    # p at the candidates, and elsewhere, where it is only ever scaled.
    p, elsewhere = target.gather(1, ids), target.scatter(1, ids, 0)
    share_elsewhere = elsewhere.sum(dim=1)
    scale = torch.ones_like(share_elsewhere)
    accepted = torch.full_like(ids[:, 0], NO_TOKEN)
    for column in range(children.shape[1]):
        token = children[:, column]
        here = ids == token[:, None]
        p_child, q_child = (p * here).sum(dim=1), (q * here).sum(dim=1)
        # Where all that q allows has been drawn, the next child was not drawn from it: no child.
        is_tried = (accepted == NO_TOKEN) & (q_child > 0)
        passes = is_tried & (chances[:, column] * q_child < p_child)
        accepted = torch.where(passes, token, accepted)
        left = _residual(p, q)
        total = left.sum(dim=1) + share_elsewhere * scale
        # Nothing is left where p = q, but for rounding; p stays.
        shrinks = is_tried & ~passes & (total > 0)
        p = torch.where(shrinks[:, None], left / total[:, None], p)
        scale = torch.where(shrinks, scale / total, scale)
        q = _without(q, here & is_tried[:, None])
    return accepted, elsewhere.mul_(scale[:, None]).scatter_(1, ids, p)


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What a child that was not accepted leaves of p, not normalised."""
    return (p - q).clamp(min=0)


def _without(q: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """The distribution that is left when some columns are taken out; zeros where nothing is."""
    q = q.masked_fill(taken, 0)
    return q / q.sum(dim=1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def exponential(
    shape: tuple[int, ...], generators: Mapping[int, torch.Generator], device: torch.device
) -> torch.Tensor:
    """Exponential noise, float32 [B, ...]; ``generators``: of requests (0 to B - 1) that have one
    of their own."""
    return _filled(torch.empty(shape, device=device), torch.Tensor.exponential_, generators)


def uniform(
    shape: tuple[int, ...], generators: Mapping[int, torch.Generator], device: torch.device
) -> torch.Tensor:
    """Likewise, uniform in [0, 1)."""
    return _filled(torch.empty(shape, device=device), torch.Tensor.uniform_, generators)


def _filled(
    noise: torch.Tensor,
    fill: Callable[..., torch.Tensor],
    generators: Mapping[int, torch.Generator],
) -> torch.Tensor:
    fill(noise)
    for request, generator in generators.items():
        fill(noise[request], generator=generator)
    return noise
