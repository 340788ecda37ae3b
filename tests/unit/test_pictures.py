"""The pictures of the documentation are drawn from real trees."""

import importlib.util
from pathlib import Path

import pytest

from vllm_medusa.tree import TokenTree

SCRIPT = Path(__file__).parents[2] / "docs" / "draw_pictures.py"


@pytest.fixture(scope="module")
def pictures():
    spec = importlib.util.spec_from_file_location("draw_pictures", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shipped_tree_is_drawn(pictures, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["draw_pictures.py", "--output", str(tmp_path)])
    pictures.main()
    for name in ("tree.png", "step.png"):
        assert (tmp_path / name).stat().st_size > 10_000
        assert (SCRIPT.parent / name).exists()


def test_nodes_do_not_overlap_and_stand_below_their_parents(pictures):
    tree, _ = pictures.read(pictures.HEADS)
    where = pictures.places(tree)
    assert len(where) == len(tree) + 1
    for path, (x, y) in where.items():
        others = [place for place in where if place != path and len(place) == len(path)]
        assert all(abs(where[other][0] - x) >= 1 for other in others)
        if path:
            assert where[path[:-1]][1] == y + 1


def test_the_path_that_is_compacted_has_something_to_move(pictures):
    tree = TokenTree.from_paths([[0], [1], [0, 0], [0, 1]])
    path = pictures.longest(tree)
    assert path == (0, 1) and tree.paths.index(path) + 1 != len(path)
    assert pictures.chance((0, 1), [[0.5, 0.2], [0.4, 0.1]]) == pytest.approx(0.05)
