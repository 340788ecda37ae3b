"""vLLM's metrics of speculation, and ours, against what was counted beside them."""

import logging

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.metrics.reader import Counter, Vector

from tests.integration.generation import SMALL_BUSHY, continuations, make_prompts, medusa, tokens
from tests.integration.generation import generate as generate_tokens
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB, add_byte_tokenizer
from tests.integration.watch import watching
from vllm_medusa.metrics import NAME

DEPTH = max(map(len, SMALL_BUSHY))
OPTIONS = {
    "skip_tokenizer_init": False,
    "reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
    "disable_log_stats": False,
}


def values(llm):
    """Metrics by name; that of ours by name and reason."""
    found = {}
    for metric in llm.get_metrics():
        if isinstance(metric, Vector):
            found[metric.name] = metric.values
        elif isinstance(metric, Counter):
            reason = metric.labels.get("reason")
            found[(metric.name, reason) if metric.name == NAME else metric.name] = metric.value
    return found


@pytest.fixture(scope="module")
def model(models):
    return add_byte_tokenizer(models("llama", seed=4))


@pytest.fixture(scope="module")
def run(model, heads, module_engine):
    """A run with forced acceptance, watched: the engine, and what the scheduler saw."""
    prompts = make_prompts(12, VOCAB, longest=20, seed=41)
    # All kinds of requests: with trees, with a grammar, and with a thinking budget, one of them
    # twice.
    each = [{"seed": number} for number in range(len(prompts))]
    each[1] |= {"thinking_token_budget": 4}
    each[5] |= {"thinking_token_budget": 9, "temperature": 0.7, "n": 2}
    each[7] |= {"structured_outputs": StructuredOutputsParams(regex="[ab]{30}"), "min_tokens": 1}
    expected = generate_tokens(module_engine(model, **OPTIONS), prompts, each, max_tokens=40)
    logger = logging.getLogger("vllm.v1.metrics.loggers")
    logger.setLevel(logging.INFO)  # vLLM keeps no log line otherwise
    llm = module_engine(model, **OPTIONS, **medusa(heads(DEPTH), SMALL_BUSHY))
    known = continuations(prompts, tokens(expected))
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = generate_tokens(llm, prompts, each, max_tokens=40)
    assert tokens(outputs) == tokens(expected)
    yield llm, watch
    logger.setLevel(logging.NOTSET)


def test_speculation(run):
    llm, watch = run
    found = values(llm)
    drafts = sum(watch.lengths.values())
    assert drafts > 20
    assert found["vllm:spec_decode_num_drafts"] == drafts
    nodes = sum(number * count for number, count in watch.num_nodes.items())
    assert found["vllm:spec_decode_num_draft_tokens"] == nodes
    accepted = sum(length * count for length, count in watch.lengths.items())
    assert found["vllm:spec_decode_num_accepted_tokens"] == accepted
    by_depth = [
        sum(count for length, count in watch.lengths.items() if length >= depth)
        for depth in range(1, DEPTH + 1)
    ]
    assert min(by_depth) > 0
    # By depth, not by node: nothing is deeper than the tree.
    positions = found["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert positions == by_depth + [0] * (len(SMALL_BUSHY) - DEPTH)


def test_requests_without_trees(run):
    llm, _ = run
    assert {key: value for key, value in values(llm).items() if NAME in key} == {
        (NAME, "thinking_budget"): 3
    }


def test_log_line_shows_tokens_per_step(run, caplog):
    llm, watch = run
    steps = sum(watch.lengths.values())
    accepted = sum(length * count for length, count in watch.lengths.items())
    logging.getLogger("vllm").addHandler(caplog.handler)
    llm.llm_engine.logger_manager.log()
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert f"Mean acceptance length: {1 + accepted / steps:.2f}" in caplog.text
    assert f"Accepted: {accepted} tokens" in caplog.text


def test_nothing_of_ours_without_medusa(model, module_engine, run):
    plain = module_engine(model, **OPTIONS, max_num_seqs=8)
    assert not any(NAME in key for key in values(plain))
