"""Heads side by side: what the calibration of the shipped heads says of them."""

import json
from pathlib import Path

from benchmarks.compare_heads import SIZES, page, table
from vllm_medusa.bench.calibration import parse_calibration
from vllm_medusa.tree import TREE_FILE

HEADS = Path(__file__).parents[2] / "heads" / "smollm2-135m-instruct"


def test_the_table_says_what_calibrate_says():
    calibration = parse_calibration(json.loads((HEADS / TREE_FILE).read_text()))
    header, _, *rows = table({"one": HEADS, "other": HEADS}).splitlines()
    assert rows[0].replace("one", "other") == rows[1]
    names, values = ([cell.strip() for cell in row.split("|")[1:-1]] for row in (header, rows[0]))
    cells = dict(zip(names, values, strict=True))
    for head, ranks in enumerate(calibration.accuracies, start=1):
        assert cells[f"head {head}"] == f"{ranks[0]:.2f}"
    for size in SIZES:
        if (tokens := calibration.tokens_per_step(size)) is not None:
            assert cells[f"{size} nodes"] == f"{tokens:.2f}"


def test_the_page_names_the_heads():
    assert "| shipped | " in page({"shipped": HEADS})
