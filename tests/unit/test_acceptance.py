"""The walk and the moves it leads to, against plain Python for one request at a time."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_tree import path_sets
from vllm_medusa.acceptance import NO_TOKEN, walk
from vllm_medusa.bank import TreeBank
from vllm_medusa.compaction import accepted_moves
from vllm_medusa.tree import TokenTree

VOCAB = 4


@st.composite
def batches(draw):
    """A tree, and per request: its number of nodes, drafts, target tokens per row, limits."""
    tree = TokenTree.from_paths(draw(path_sets()))
    token = st.integers(0, VOCAB - 1)
    requests = [
        (
            draw(st.integers(0, len(tree))),
            draw(st.lists(token, min_size=len(tree), max_size=len(tree))),
            draw(st.lists(token, min_size=len(tree) + 1, max_size=len(tree) + 1)),
            draw(st.booleans()),
            draw(st.integers(1, 5)),
        )
        for _ in range(draw(st.integers(1, 4)))
    ]
    return tree, requests


def plain_walk(tree, nodes, drafts, target, is_active, limit):
    """The rule as it is written: draw, go to the child with that token, repeat."""
    tokens, rows = [], []
    row = 0
    while is_active:
        tokens.append(target[row])
        rows.append(row)
        path = () if row == 0 else tree.paths[row - 1]
        children = [
            node + 1
            for node in range(nodes)
            if tree.paths[node][:-1] == path and drafts[node] == target[row]
        ]
        if not children or len(tokens) == limit:
            break
        row = children[0]
    return tokens, rows


@settings(max_examples=300)
@given(batches())
def test_walk_and_moves(batch):
    tree, requests = batch
    width = max(nodes for nodes, *_ in requests)
    drafts = torch.full((len(requests), width), NO_TOKEN)
    for index, (nodes, tokens, *_) in enumerate(requests):
        drafts[index, :nodes] = torch.tensor(tokens[:nodes], dtype=torch.int64)
    target = torch.tensor([request[2] for request in requests])
    active = torch.tensor([request[3] for request in requests])
    limits = torch.tensor([request[4] for request in requests])
    drawn: list[list[int]] = [[] for _ in requests]

    def draw(rows, active, step):
        for index in active.nonzero().flatten().tolist():
            assert len(drawn[index]) == step  # no number of a request is used up in vain
            drawn[index].append(int(rows[index]))
        return target.gather(1, rows[:, None])[:, 0]

    parents = TreeBank([tree]).parents[0, :width].expand(len(requests), width)
    paths = walk(draw, drafts, parents, active, limits)

    # Slots: request by request, one for each row, with gaps between.
    first_rows = torch.arange(len(requests)) * (len(tree) + 1)
    slots = torch.arange(len(requests) * (len(tree) + 1)) * 3 + 5
    cache = {int(slot): int(slot) for slot in slots}
    for source, destination in zip(
        *map(torch.Tensor.tolist, accepted_moves(paths, slots, first_rows)), strict=True
    ):
        assert source != destination
        cache[destination] = cache[source]

    for index, request in enumerate(requests):
        tokens, rows = plain_walk(tree, *request)
        kept = paths.tokens[index]
        assert kept[kept != NO_TOKEN].tolist() == tokens
        assert (kept[len(tokens) :] == NO_TOKEN).all()
        assert drawn[index] == rows
        if rows:
            assert int(paths.last_rows[index]) == rows[-1]
        # After the moves the place of depth d holds what was written at the path's row of depth d.
        start = int(first_rows[index])
        for depth, row in enumerate(rows):
            assert cache[int(slots[start + depth])] == int(slots[start + row])
