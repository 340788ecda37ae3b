"""Lossless acceptance for deterministic drafts: walk the tree with tokens drawn from the target.

The drafts (top-k of each head) are fixed before any random number of the step is drawn. So the
exact rule is: at the current row draw x from the target's distribution; if x is one of the row's
children, go there and draw again, else x is the bonus token. Every emitted token is a draw from
the target given its own prefix, whatever the drafts were, hence the output's distribution is the
target's. A node is accepted with exactly the target's probability of its path, the highest any
lossless rule reaches for fixed drafts. Greedy decoding is the same walk with argmax.

The walk may stop anywhere: the last token drawn is then the bonus token. This is how requests are
served whose rules hold at the root only (``max_steps``).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

NO_LIMIT = 2**31 - 1  # of the tokens a request may draw in a step; fits int32
NO_TOKEN = -1  # vLLM's placeholder in sampled_token_ids (PLACEHOLDER_TOKEN_ID)


class AcceptedPaths(NamedTuple):
    """What a walk kept, for B requests; S is the largest number of tokens any of them got."""

    tokens: torch.Tensor
    """int64 [B, S]: accepted tokens and the bonus token, then ``NO_TOKEN``."""
    rows: torch.Tensor
    """int64 [B, S]: the row (0 = root) each token was drawn at; behind the end the last such
    row."""

    @property
    def last_rows(self) -> torch.Tensor:
        """int64 [B]: the row at the end of each path, where the bonus token was drawn."""
        return self.rows[:, -1]


def walk(
    draw: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor],
    draft_tokens: torch.Tensor,
    parents: torch.Tensor,
    active: torch.Tensor,
    max_steps: torch.Tensor | None = None,
    num_steps: int | None = None,
) -> AcceptedPaths:
    """Walk every request's tree at once, one depth per iteration.

    Args:
        draw: ``draw(rows, active, step)`` draws one token per request from the target at ``rows``
            (int64 [B], row within the request's tree) and returns int64 [B]. It must not use up a
            request's own random numbers where ``active`` (bool [B]) is false.
        draft_tokens: int64 [B, N], the nodes' tokens; ``NO_TOKEN`` behind a request's last node.
        parents: int64 [B, N], row of each node's parent.
        active: bool [B], requests that sample in this step.
        max_steps: int64 [B], how many tokens a request may draw at most in this step; None: no
            limit.
        num_steps: how many times to draw (the deepest tree's depth and one), without looking
            whether a request is still on its way: on a GPU looking would mean to wait for it.
            None: as long as one is.

    Returns:
        The accepted paths. Requests that are not active get no token.
    """
    rows = torch.zeros(draft_tokens.shape[0], dtype=torch.int64, device=draft_tokens.device)
    tokens_by_step, rows_by_step = [], []
    # A path visits a row at most once, so the loop ends by itself; it runs depth + 1 times at most.
    for step in range(num_steps or draft_tokens.shape[1] + 1):
        drawn = draw(rows, active, step)
        tokens_by_step.append(drawn.masked_fill(~active, NO_TOKEN))
        rows_by_step.append(rows)
        if draft_tokens.shape[1] == 0:
            break
        is_child = (parents == rows[:, None]) & (draft_tokens == drawn[:, None])
        found, node = is_child.max(dim=1)
        active = active & found
        if max_steps is not None:
            active = active & (step + 1 < max_steps)
        if num_steps is None and not active.any():
            break
        rows = torch.where(active, node + 1, rows)
    return AcceptedPaths(torch.stack(tokens_by_step, dim=1), torch.stack(rows_by_step, dim=1))
