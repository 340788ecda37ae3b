"""The levels of a tree: which rows a depth reads and which it fills."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa.drafter import levels_of
from vllm_medusa.tree import TokenTree


@st.composite
def trees(draw):
    nodes = []
    for _ in range(draw(st.integers(1, 20))):
        parents = [()] + [node for node in nodes if len(node) < 4]
        parent = draw(st.sampled_from(parents))
        free = [rank for rank in range(6) if (*parent, rank) not in nodes]
        if free:
            nodes.append((*parent, draw(st.sampled_from(free))))
    return TokenTree.from_paths(nodes)


@given(trees())
@settings(max_examples=200, deadline=None)
def test_levels_fill_every_node_from_the_path_to_it(tree):
    levels = levels_of(tree, torch.device("cpu"))
    filled = {0: ()}  # row -> the rank path it stands for
    for depth, level in enumerate(levels, start=1):
        assert level.paths.shape[1] == depth
        # Each parent is asked once, and all that its rows stand for is known by now.
        behind = [[filled[row] for row in rows] for rows in level.paths.tolist()]
        assert len({rows[-1] for rows in behind}) == len(behind)
        for rows in behind:
            assert [len(path) for path in rows] == list(range(depth))
            assert all(rows[-1][:length] == path for length, path in enumerate(rows))
        for node, place in zip(level.nodes.tolist(), level.places.tolist(), strict=True):
            parent, rank = divmod(place, level.num_ranks)
            filled[node] = (*behind[parent][-1], rank)
    assert filled == {0: ()} | dict(enumerate(tree.paths, start=1))
