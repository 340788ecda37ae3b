"""Topology of token trees, by property and by example."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_medusa.bank import TreeBank
from vllm_medusa.tree import (
    MAX_NODES,
    TokenTree,
    TreeError,
    default_tree,
    read_tree,
    stored_num_nodes,
)


@st.composite
def path_sets(draw):
    """Rank paths of a tree with 1 to 40 nodes, in any order."""
    paths = [(draw(st.integers(0, 3)),)]
    for _ in range(draw(st.integers(0, 39))):
        parent = draw(st.sampled_from([(), *paths]))
        path = (*parent, draw(st.integers(0, 5)))
        if path not in paths:
            paths.append(path)
    return draw(st.permutations(paths))


@given(path_sets())
def test_any_order_becomes_nested(paths):
    tree = TokenTree.from_paths(paths)
    assert sorted(tree.paths) == sorted(paths)
    for size in range(1, len(tree) + 1):  # every prefix is a tree again
        assert TokenTree.from_paths(tree.prefix(size).paths).paths == tree.paths[:size]


@given(path_sets())
def test_a_nested_order_is_kept(paths):
    nested = TokenTree.from_paths(paths).paths
    assert TokenTree.from_paths(nested).paths == nested


@given(path_sets())
def test_mask_and_parents_agree_with_paths(paths):
    tree = TokenTree.from_paths(paths)
    rows = [(), *tree.paths]
    expected = [[row[: len(other)] == other for other in rows] for row in rows]
    assert (tree.ancestor_mask() == np.array(expected)).all()
    assert [rows[parent] for parent in tree.parent_rows()] == [path[:-1] for path in tree.paths]
    assert tree.row_depths().tolist() == [len(row) for row in rows]


@given(path_sets())
def test_siblings_are_numbered(paths):
    tree = TokenTree.from_paths(paths)
    numbered = tree.with_siblings_numbered()
    assert (numbered.parent_rows() == tree.parent_rows()).all()
    for row in range(len(tree) + 1):
        children = [n for n, parent in enumerate(tree.parent_rows()) if parent == row]
        assert [numbered.paths[node][-1] for node in children] == list(range(len(children)))
    for size in range(1, len(tree) + 1):
        assert tree.prefix(size).with_siblings_numbered() == numbered.prefix(size)


@given(st.lists(path_sets(), min_size=1, max_size=3))
def test_bank_holds_the_same_as_its_trees(path_lists):
    trees = [TokenTree.from_paths(paths) for paths in path_lists]
    bank = TreeBank(trees)
    for index, tree in enumerate(trees):
        rows = len(tree) + 1
        assert (bank.parents[index, : rows - 1].numpy() == tree.parent_rows()).all()
        assert (bank.parents[index, rows - 1 :] == -1).all()
        for row, nodes in enumerate(bank.children[index].tolist()):
            own = [node for node, parent in enumerate(tree.parent_rows()) if parent == row]
            assert nodes == own + [-1] * (len(nodes) - len(own))
        offset = bank.depth_offset[index, :rows].numpy()
        assert (offset + np.arange(rows) == tree.row_depths()).all()
        words = bank.ancestors[index].numpy().view(np.uint64)
        bits = [[int(word[j // 64]) >> (j % 64) & 1 for j in range(rows)] for word in words[:rows]]
        assert (np.array(bits, dtype=bool) == tree.ancestor_mask()).all()


@given(
    st.lists(
        st.lists(st.floats(0.01, 0.4), min_size=2, max_size=3).map(lambda row: sorted(row)[::-1]),
        min_size=1,
        max_size=3,
    ),
    st.integers(1, 5),
)
def test_growth_is_best_at_every_size(accuracies, size):
    def value(path):
        return np.prod([accuracies[depth][rank] for depth, rank in enumerate(path)])

    every = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in itertools.product(*(range(len(row)) for row in accuracies[:depth]))
    ]
    tree = TokenTree.grow(accuracies, size)
    best = sorted(map(value, every), reverse=True)[: len(tree)]
    assert len(tree) == min(size, len(every))
    assert np.allclose(sorted(map(value, tree.paths), reverse=True), best)


def test_growth_with_a_head_that_is_never_right():
    assert TokenTree.grow([[0.5, 0.0], [0.0]], 4).paths[0] == (0,)


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], "non-empty list"),
        ("[0]", "non-empty list"),
        ([[0], [0, 0], [0]], r"repeats the nodes \[0\]"),
        ([[0], [1, 0], [2, 1, 0]], r"misses the parents \[1\], \[2, 1\]"),
        ([[0], [0, -1]], r"\(0, -1\)|\[0, -1\]"),
        ([[0], [True]], "not a path"),
        ([[0], []], "not a path"),
        ([[0], 3], "not a path"),
        ([[rank] for rank in range(MAX_NODES + 1)], "128 nodes, at most 127"),
    ],
)
def test_bad_paths_are_named(paths, words):
    with pytest.raises(TreeError, match=words):
        TokenTree.from_paths(paths)


def test_fits_heads():
    tree = TokenTree.from_paths([[0], [5], [0, 1]])
    tree.check_fits(num_heads=2, num_tokens=6, heads="H")
    with pytest.raises(TreeError, match=r"depth 2 \(node \[0, 1\]\), but H holds 1 heads"):
        tree.check_fits(num_heads=1, num_tokens=6, heads="H")
    with pytest.raises(TreeError, match=r"rank 5, but the draft vocabulary of H holds 5 tokens"):
        tree.check_fits(num_heads=2, num_tokens=5, heads="H")


def test_reads_every_notation(tmp_path):
    file = tmp_path / "tree.json"
    expected = ((0,), (0, 0))
    assert read_tree([[0], [0, 0]], 2).paths == expected
    assert read_tree("[[0], [0, 0]]", 2).paths == expected
    assert read_tree("chain", 2).paths == expected
    assert read_tree("chain", 4, num_nodes=2).paths == expected
    file.write_text("[[0, 0], [0]]")
    assert read_tree(str(file), 2).paths == expected
    file.write_text(json.dumps({"paths": [[0], [0, 0]], "num_speculative_tokens": 1}))
    assert read_tree(file, 2).paths == expected
    assert stored_num_nodes(file) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[0]", "not valid JSON"),
        ('{"nodes": []}', "no key 'paths'; found the keys .*nodes"),
        ('{"paths": [[1, 0]]}', r"misses the parents \[1\]"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, words):
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(TreeError, match=words) as error:
        read_tree(file, 4)
    assert str(file) in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TreeError, match=r"none\.json cannot be read"):
        read_tree(tmp_path / "none.json", 4)


@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize("nodes", [1, 3, 15])
def test_default_tree_has_the_size_asked_for(num_heads, nodes):
    tree = default_tree(num_heads, nodes)
    assert len(tree) == min(nodes, 10 if num_heads == 1 else nodes)
    assert tree.depth <= num_heads
