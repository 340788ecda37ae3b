"""The script that measures on a GPU, at toy size in Triton's interpreter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPTH = 4


@pytest.mark.slow
def test_toy(tmp_path):
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--toy", "--output"]
    subprocess.run([*script, str(tmp_path)], check=True, timeout=900)
    results = json.loads((tmp_path / "gpu.json").read_text())
    (context,) = results["toy, plain, eager"]
    rates = {
        name: results[f"toy, {name}, eager"][context]["tokens_per_step"]
        for name in ("plain", "chain", "tree")
    }
    # The oracle's drafts are right: a step keeps a whole path, but for the text's end.
    assert rates["plain"] == 1
    assert rates["chain"] == rates["tree"] > DEPTH - 1
    assert set(results["kernels, toy"][context]) == {"tree attention", "walk", "compaction"}
    assert "no GPU" in (tmp_path / "gpu.md").read_text()
    # A finished run starts nothing again.
    done = subprocess.run([*script, str(tmp_path)], check=True, capture_output=True, text=True)
    assert " of 4:" not in done.stdout
