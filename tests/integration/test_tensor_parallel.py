"""Two ranks give what one gives: text, and drafts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.generation import fewer, generate, make_prompts, some, tokens
from tests.integration.tiny import VOCAB, idle_heads, make_repeating_model, save_heads
from tests.triton_interpreter import ENABLED as INTERPRETED

ROOT = Path(__file__).parents[2]

# Runs in a process of its own: worker processes are spawned, and threads bound, per engine.
SCRIPT = """
import json, sys
from tests import triton_interpreter  # a worker process runs this first, too

if triton_interpreter.ENABLED:
    triton_interpreter.enable()
from vllm import LLM, SamplingParams

def main():
    model, (options, prompts, params) = sys.argv[1], map(json.loads, sys.argv[2:])
    llm = LLM(model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
              max_model_len=256, max_num_seqs=8, disable_log_stats=False,
              tensor_parallel_size=2, **options)
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [SamplingParams(**own, max_tokens=48, ignore_eos=True, detokenize=False) for own in params],
        use_tqdm=False,
    )
    counters = {metric.name: metric.value for metric in llm.get_metrics()
                if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")}
    print("RESULT " + json.dumps([[list(o.outputs[0].token_ids) for o in outputs], counters]))

if __name__ == "__main__":
    main()
"""


def run_two_ranks(folder, model, options, prompts, params=None):
    """Texts and counters of an engine with two worker processes; ``params``: of each request."""
    params = params or [{"temperature": 0.0}] * len(prompts)
    script = folder / "generate.py"
    script.write_text(SCRIPT)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    if INTERPRETED:
        environment["TORCH_COMPILE_DISABLE"] = "1"  # it looks for a compiler of Triton's
    result = subprocess.run(
        [sys.executable, str(script), str(model), *map(json.dumps, (options, prompts, params))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, result.stdout[-3000:] + result.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_repeating_model(tmp_path_factory.mktemp("repeats"))


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(fewer(8, 3), VOCAB, longest=40)


def own_lm_heads(model):
    from transformers import AutoModelForCausalLM

    weight = AutoModelForCausalLM.from_pretrained(model).lm_head.weight.detach()
    return idle_heads(2) | {f"{head}.1.weight": weight.clone() for head in range(2)}


@pytest.mark.parametrize(
    "kind", some(["shared", "draft vocabulary", "one rank's vocabulary", "own LM heads"])
)
def test_two_ranks(kind, model, prompts, engine, tmp_path):
    if kind == "own LM heads":
        tensors, config = own_lm_heads(model), {}
    else:
        tensors, config = idle_heads(2), {"version": "2"}
        if kind == "draft vocabulary":  # most of it in the second rank's part
            tensors["token_map"] = torch.cat([torch.arange(3, 40), torch.arange(100, VOCAB)])
        if kind == "one rank's vocabulary":  # nothing of it in the first rank's part
            tensors["token_map"] = torch.arange(VOCAB // 2, VOCAB)
    config |= {"medusa_num_heads": 2, "medusa_num_layers": 1}
    heads = save_heads(tmp_path / "heads", tensors, **config)
    tree = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [3]]
    config = {"method": "medusa", "model": str(heads), "tree": tree, "lookup": False}
    options = {"speculative_config": config}

    expected = tokens(generate(engine(model), prompts, max_tokens=48))
    one_rank = engine(model, disable_log_stats=False, **options)
    assert tokens(generate(one_rank, prompts, max_tokens=48)) == expected
    counters = {
        metric.name: metric.value
        for metric in one_rank.get_metrics()
        if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value")
    }
    text_of_two, counters_of_two = run_two_ranks(tmp_path, model, options, prompts)
    assert text_of_two == expected
    # The same drafts, as many were right. How many were made depends on when requests arrive.
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    assert counters_of_two["vllm:spec_decode_num_accepted_tokens"] == accepted
    assert accepted > 0.2 * counters["vllm:spec_decode_num_drafts"]


def test_two_ranks_draw_drafts(model, prompts, engine, tmp_path):
    """Requests that sample from one token only, and others beside them."""
    tensors = idle_heads(2) | {
        "token_map": torch.cat([torch.arange(3, 40), torch.arange(99, VOCAB)])
    }
    heads = save_heads(
        tmp_path / "heads", tensors, version="2", medusa_num_heads=2, medusa_num_layers=1
    )
    config = {"method": "medusa", "model": str(heads), "tree": [[0], [1], [0, 0]], "lookup": False}
    config["draft_sample_method"] = "probabilistic"
    # Drafts may be any token, the target's is certain.
    certain, other = {"temperature": 1.0, "min_p": 1.0}, {"temperature": 0.2}
    params = [certain if number % 2 else other for number in range(len(prompts))]
    expected = tokens(generate(engine(model), prompts, max_tokens=48))
    text, counters = run_two_ranks(tmp_path, model, {"speculative_config": config}, prompts, params)
    assert text[1::2] == expected[1::2]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    assert accepted > 0.2 * counters["vllm:spec_decode_num_drafts"]
