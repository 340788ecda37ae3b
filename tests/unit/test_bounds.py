"""docs/bounds.md says what the shipped heads' calibration gives."""

import json
from pathlib import Path

import pytest

from benchmarks.bounds import better, expected_tokens, needed_accuracies, page
from vllm_medusa.bench.calibration import parse_calibration
from vllm_medusa.tree import TREE_FILE

ROOT = Path(__file__).parents[2]
HEADS = ROOT / "heads" / "smollm2-135m-instruct"


def test_the_page_is_that_of_the_shipped_heads():
    stored = json.loads((HEADS / TREE_FILE).read_text())
    written = (ROOT / "docs" / "bounds.md").read_text()
    assert written == page(parse_calibration(stored), stored["machine"])


def test_expected_tokens():
    accuracies = [[0.5, 0.25], [0.4, 0.2]]
    assert expected_tokens(accuracies, 1) == pytest.approx(1.5)
    # The best three nodes: both of the first head, and the best behind the best (0.5 * 0.4).
    assert expected_tokens(accuracies, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.2)


def test_needed_accuracies():
    accuracies = [[0.4, 0.1], [0.3, 0.1]]
    assert better(accuracies, 0.0) == accuracies
    assert [sum(ranks) for ranks in better(accuracies, 1.0)] == pytest.approx([1.0, 1.0])
    now = expected_tokens(accuracies, 6)
    needed = needed_accuracies(accuracies, now, now + 0.3, 6)
    assert expected_tokens(needed, 6) == pytest.approx(now + 0.3, abs=1e-6)
