"""Compaction: moving the accepted path's keys and values right behind the context.

Node i of a request was written to the slot behind its root's at distance i + 1, whatever its
depth. The accepted node of depth d belongs at distance d. Nodes stand behind their ancestors, so
the target slot of a move is never behind its source, and moving in order of depth overwrites
nothing that is still needed.
"""

import torch

from vllm_medusa.acceptance import AcceptedPaths


def accepted_moves(
    paths: AcceptedPaths, slots: torch.Tensor, first_rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots to move, in the order in which to move them.

    Args:
        paths: the accepted paths of B requests.
        slots: int64 [tokens], the slot of every row of the step (vLLM's slot mapping).
        first_rows: int64 [B], index into ``slots`` of each request's root.

    Returns:
        Source and target slots, int64 [moves] each; accepted nodes already in place are left out.
    """
    depths = torch.arange(paths.rows.shape[1], device=slots.device)
    # Token s of a path was drawn at the node of depth s, so rows[:, s] is that node's row, as long
    # as the path is that long. Behind its end rows repeats the last row, which must not move again.
    moved = (paths.rows != depths) & (paths.tokens >= 0)
    source = slots[(first_rows[:, None] + paths.rows)[moved]]
    target = slots[(first_rows[:, None] + depths).expand_as(paths.rows)[moved]]
    return source, target
