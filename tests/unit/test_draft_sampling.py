"""docs/draft-sampling.md says what was counted."""

import json
from pathlib import Path

from benchmarks.draft_sampling import WAYS, page, verdict

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_that_of_its_numbers():
    counted = json.loads((DOCS / "draft-sampling.json").read_text())
    assert (DOCS / "draft-sampling.md").read_text() == page(counted)


def test_verdict():
    fixed, drawn, _ = WAYS
    rows = [
        {"nodes": 3, "temperature": 0.3, fixed: 1.5, drawn: 1.4},
        {"nodes": 3, "temperature": 1.0, fixed: 1.3, drawn: 1.4},
    ]
    assert "in 1 of 2 rows (3 nodes at 1.0)." in verdict(rows)
    assert verdict(rows[:1]).endswith("in 0 of 1 rows.")
