"""The walk in one launch gives what the plain walk gives."""

import pytest
import torch

from vllm_medusa.acceptance import NO_TOKEN, walk
from vllm_medusa.acceptance_kernel import walk_drawn_tokens
from vllm_medusa.bank import TreeBank
from vllm_medusa.tree import TokenTree, default_tree

VOCAB = 3  # so few that drafts are often right


@pytest.mark.parametrize("seed", range(8))
def test_equals_the_plain_walk(seed, device):
    generator = torch.Generator().manual_seed(seed)

    def random(high, *size):
        return torch.randint(0, high, size, generator=generator)

    trees = [default_tree(4, 40), TokenTree.chain(6), default_tree(2, 5)]
    bank = TreeBank(trees)
    tree_of = random(len(trees), 12)
    # The first nodes of each tree, down to none at all.
    num_nodes = torch.stack([random(len(trees[tree]) + 1, 1)[0] for tree in tree_of])
    cu_num_rows = torch.zeros(len(tree_of) + 1, dtype=torch.int32)
    torch.cumsum(num_nodes + 1, dim=0, out=cu_num_rows[1:])
    first_rows = cu_num_rows[:-1].long()
    drawn, drafts = (random(VOCAB, int(cu_num_rows[-1])) for _ in range(2))
    drafts[random(8, len(drafts)) == 0] = NO_TOKEN
    num_steps = 1 + max(tree.depth for tree in trees)

    inputs = (drawn, drafts.int(), cu_num_rows, tree_of, bank.parents)
    found = walk_drawn_tokens(*(tensor.to(device) for tensor in inputs), num_steps)

    padded = torch.full((len(tree_of), int(num_nodes.max())), -1)
    for row, first, size in zip(padded, first_rows.tolist(), num_nodes.tolist(), strict=True):
        row[:size] = drafts[first + 1 : first + 1 + size]
    expected = walk(
        lambda rows, active, step: drawn[first_rows + rows],
        padded,
        bank.parents[tree_of, : padded.shape[1]],
        torch.ones(len(tree_of), dtype=torch.bool),
        num_steps=num_steps,
    )
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert torch.equal(found.rows.cpu(), expected.rows)
    assert (found.tokens[:, 2] >= 0).any()  # some paths are deep
