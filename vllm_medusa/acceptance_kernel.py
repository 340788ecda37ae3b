"""The walk of acceptance.py in one launch: tokens drawn at every row in, accepted paths out.

Where no rule depends on the path itself, a token can be drawn from the target at every row at once;
which of them count is then a matter of following equal tokens down the tree. One program per
request, nothing is read back to the host.
"""

import torch
from vllm.triton_utils import tl, triton

from vllm_medusa.acceptance import NO_TOKEN, AcceptedPaths


@triton.jit
def _walk_kernel(
    tokens_ptr,  # [B, STEPS]
    rows_ptr,  # [B, STEPS]
    drawn_ptr,  # [rows]
    drafts_ptr,  # [rows]
    cu_num_rows_ptr,  # [B + 1]
    tree_ptr,  # [B]
    parents_ptr,  # [trees, max nodes]
    parents_stride,
    NO_TOKEN: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.load(cu_num_rows_ptr + request)
    num_nodes = tl.load(cu_num_rows_ptr + request + 1) - first - 1
    tree = tl.load(tree_ptr + request)
    node = tl.arange(0, BLOCK)
    is_node = node < num_nodes
    parents = tl.load(parents_ptr + tree * parents_stride + node, mask=is_node, other=-1)
    drafts = tl.load(drafts_ptr + first + 1 + node, mask=is_node, other=-1)
    row = first * 0
    walking = row == row
    for step in range(STEPS):
        token = tl.load(drawn_ptr + first + row)
        tl.store(tokens_ptr + request * STEPS + step, tl.where(walking, token, NO_TOKEN))
        tl.store(rows_ptr + request * STEPS + step, row)
        is_child = is_node & (parents == row) & (drafts == token)
        child = tl.min(tl.where(is_child, node, BLOCK), axis=0)
        walking = walking & (child < BLOCK)
        row = tl.where(walking, child + 1, row)


def walk_drawn_tokens(
    drawn: torch.Tensor,
    drafts: torch.Tensor,
    cu_num_rows: torch.Tensor,
    trees: torch.Tensor,
    parents: torch.Tensor,
    num_steps: int,
) -> AcceptedPaths:
    """Walk the trees of B requests.

    Args:
        drawn: int64 [rows], the token drawn from the target at every row.
        drafts: integers [rows], the token that was read at every row; ``NO_TOKEN``: none to accept.
        cu_num_rows: int32 [B + 1], where each request's rows begin: its root, then its nodes.
        trees: int64 [B], each request's tree.
        parents: int64 [trees, nodes], ``TreeBank.parents``.
        num_steps: depth of the deepest tree, and one.

    Returns:
        The accepted paths, [B, num_steps] each, as ``acceptance.walk`` gives them.
    """
    num_requests = trees.shape[0]
    tokens = drawn.new_empty(num_requests, num_steps)
    rows = drawn.new_empty(num_requests, num_steps)
    _walk_kernel[(num_requests,)](
        tokens,
        rows,
        drawn,
        drafts,
        cu_num_rows,
        trees,
        parents,
        parents.stride(0),
        NO_TOKEN=NO_TOKEN,
        STEPS=num_steps,
        BLOCK=triton.next_power_of_2(parents.shape[1]),
    )
    return AcceptedPaths(tokens, rows)
