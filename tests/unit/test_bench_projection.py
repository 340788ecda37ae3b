"""The roofline projection: its parts against numbers worked out by hand."""

import json
from pathlib import Path

import pytest

from vllm_medusa.bench.projection import (
    Gpu,
    Heads,
    Model,
    drafting_seconds,
    gain,
    main,
    relative_cost,
    roofline_seconds,
    step_seconds,
)
from vllm_medusa.heads.checkpoint import inspect_heads

GPU = Gpu("abacus", bandwidth=100.0, operations=1000.0)
MODEL = Model("tiny", parameters=50, layers=2, kv_width=1, hidden=2, vocabulary=10)


def test_the_slower_part_counts():
    assert roofline_seconds(GPU, 200, 1000) == 2.0
    assert roofline_seconds(GPU, 100, 3000) == 3.0


def test_step():
    # Reading: 2 bytes of 50 weights. Computing: 2 * 50 * rows.
    assert step_seconds(GPU, MODEL, rows=1, batch_size=1, context=0) == 1.0
    assert step_seconds(GPU, MODEL, rows=10, batch_size=1, context=0) == 1.0
    assert step_seconds(GPU, MODEL, rows=20, batch_size=1, context=0) == 2.0
    assert step_seconds(GPU, MODEL, rows=1, batch_size=20, context=0) == 2.0
    # 10 cached tokens: 2 bytes of 2 * 2 * 1 * 10 numbers more.
    assert step_seconds(GPU, MODEL, rows=1, batch_size=1, context=10) == pytest.approx(1.8)


def test_drafting():
    # Blocks 3 * 4 and LM head 20 numbers are read once for all heads.
    assert drafting_seconds(GPU, MODEL, Heads(3), batch_size=1) == pytest.approx(0.64)
    assert drafting_seconds(GPU, MODEL, Heads(3, 5), batch_size=1) == pytest.approx(0.44)
    # Blocks 4 * (2 + 3 + 4), and the LM head three times: 36 and 3 * 20 numbers.
    one_by_one = Heads(3, sequential=True)
    assert drafting_seconds(GPU, MODEL, one_by_one, batch_size=1) == pytest.approx(1.92)
    # Blocks 2 * 3 * 4.
    two_layers = Heads(3, layers=2)
    assert drafting_seconds(GPU, MODEL, two_layers, batch_size=1) == pytest.approx(0.88)
    # 2 * 20 * (12 + 3 * 20) operations.
    assert drafting_seconds(GPU, MODEL, Heads(3), batch_size=20) == pytest.approx(2.88)


def test_the_heads_are_read_from_their_files():
    """Those of the repository: their blocks are as large as the stored ones, but for biases."""
    folder = Path(__file__).parents[2] / "heads" / "smollm2-135m-instruct"
    info = inspect_heads(folder)
    heads = Heads.of(str(folder))
    assert heads == Heads(4, info.draft_vocab_size, sequential=True, layers=3)
    biases = info.num_heads * info.num_layers * info.hidden_size
    assert heads.block_parameters(info.hidden_size) == info.num_parameters - biases


def test_relative_cost_and_gain():
    def cost(nodes, batch_size=1):
        return relative_cost(GPU, MODEL, Heads(3), nodes, batch_size, context=0)

    assert cost(0) == 1.0
    assert cost(3) == pytest.approx(1.64)
    assert cost(19) == pytest.approx(2.64)
    assert cost(3, batch_size=10) > 4
    assert gain(2.0, 1.6) == 1.25


def test_page(tmp_path):
    sizes = tmp_path / "sizes.json"
    counted = {"chat": {"1": 1.5, "63": 2.5}, "code": {"1": 1.4, "63": 2.4}}
    sizes.write_text(json.dumps({"tokens_per_step": counted}))
    heads = Path(__file__).parents[2] / "heads" / "smollm2-135m-instruct"
    main([str(sizes), "--heads", str(heads), "--output", str(tmp_path / "page.md")])
    page = (tmp_path / "page.md").read_text()
    assert "Projected, not measured" in page
    assert "| chat | 1.50 | 2.50 |" in page
    lines = [line.split("|") for line in page.splitlines() if line.startswith("| A100 80 GB")]
    assert len(lines) == 2 * 3 * 2
    # Of a 7B model at batch 1 the weights' bytes decide: 63 nodes cost little more than one.
    seven = next(line for line in lines if "7B" in line[2] and line[3].strip() == "1")
    assert 2.2 < float(seven[6]) < 2.5
    # At batch 32 the 64 * 32 rows are bound by operations, and 63 nodes are a loss.
    seven = next(line for line in lines if "7B" in line[2] and line[3].strip() == "32")
    assert float(seven[6]) < 1


def test_the_page_in_the_docs_is_that_of_the_shipped_heads(capsys):
    root = Path(__file__).parents[2]
    main([str(root / "docs/sizes.json"), "--heads", str(root / "heads/smollm2-135m-instruct")])
    assert capsys.readouterr().out == (root / "docs" / "projection.md").read_text()
