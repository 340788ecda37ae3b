"""One rank decides what is accepted, and tells the others.

Under tensor parallelism every rank of vLLM draws the tokens itself: all hold the same logits and
have seeded the same random numbers. That agrees for as long as all ranks draw the same numbers, as
often, and compute them to the last bit alike, which a cluster of different machines does not
promise; and ranks that once kept different paths write different keys and values from then on,
without any error. So the first rank of the group, whose output vLLM returns, decides alone.
"""

from collections.abc import Callable

import torch
from vllm.distributed import get_tp_group

from vllm_medusa.acceptance import NO_TOKEN, AcceptedPaths


def decide_once(
    decide: Callable[[], AcceptedPaths], num_requests: int, max_steps: int, device: torch.device
) -> AcceptedPaths:
    """What the first rank of the tensor-parallel group decides, on all of its ranks.

    One broadcast of 2 * num_requests * max_steps int64 numbers, for which the host does not wait;
    with one rank, none.

    Args:
        decide: walks the trees; called on the first rank only.
        num_requests: how many requests the walk is for.
        max_steps: the most tokens that any of them can get.
        device: of the walk's result.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return decide()
    message = torch.empty((2, num_requests, max_steps), dtype=torch.int64, device=device)
    if group.rank_in_group == 0:
        paths = decide()
        missing = max_steps - paths.tokens.shape[1]
        no_tokens = paths.tokens.new_full((num_requests, missing), NO_TOKEN)
        message[0] = torch.cat([paths.tokens, no_tokens], dim=1)
        message[1] = torch.cat([paths.rows, paths.rows[:, -1:].expand(-1, missing)], dim=1)
    tokens, rows = group.broadcast(message, src=0)
    return AcceptedPaths(tokens, rows)
