"""examples/train_calibrate_bench.sh, from prompts to a table with a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.tiny import add_tokenizer, make_model
from vllm_medusa.cpu_setup import cpu_environment
from vllm_medusa.heads.checkpoint import inspect_heads
from vllm_medusa.stored_tree import read_stored_tree
from vllm_medusa.tree import TREE_FILE

SCRIPT = Path(__file__).parents[2] / "examples" / "train_calibrate_bench.sh"
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        env=os.environ | cpu_environment() | own | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_from_prompts_to_a_table(tmp_path):
    model = add_tokenizer(make_model(tmp_path / "model"))
    data, template = tmp_path / "data.jsonl", tmp_path / "template.jinja"
    data.write_text("".join(json.dumps({"prompt": f"What is {n}?"}) + "\n" for n in range(12)))
    template.write_text(TEMPLATE)
    heads = tmp_path / "heads"
    result = run(
        model, data, heads,
        TRAIN=f"--chat-template {template} --max-answer-tokens 16 --max-length 128 --heads 2 "
        "--max-steps 4 --validation 0.3 --draft-vocab 200 --mixed-precision no",
        CALIBRATE="--eager --dtype float32 --max-num-seqs 1 --nodes 3 --context 20",
        BENCH=f"--eager --dtype float32 --data {data} --prompts 2 --max-tokens 8 --no-ngram "
        f"--max-model-len 128 --chat-template {template}",
        VLLM_MEDUSA_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert inspect_heads(str(heads)).num_heads == 2
    assert len(read_stored_tree(heads / TREE_FILE, 2).tree) == 3
    rows = json.loads((tmp_path / "heads.bench" / "bench.json").read_text())["rows"]
    assert {row["identical"] for row in rows} == {2}


def test_without_arguments_it_says_how_it_is_called():
    result = run()
    assert result.returncode == 2
    assert "examples/train_calibrate_bench.sh MODEL prompts.jsonl HEADS" in result.stderr
