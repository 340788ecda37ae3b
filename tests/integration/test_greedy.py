"""Greedy output with trees is token-identical to vLLM without speculation."""

import pytest

from tests.integration.generation import (
    TREES,
    continuations,
    fewer,
    generate,
    make_prompts,
    medusa,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB
from tests.triton_interpreter import ENABLED as INTERPRETED


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(fewer(64), VOCAB, longest=fewer(120))


@pytest.fixture(scope="module")
def references():
    """Tokens of engines without speculation, by model kind; filled by the first test of each."""
    return {}


# Each run takes minutes in the interpreter.
FEW = ["chain4", "bushy63"]


@pytest.mark.parametrize("tree", FEW if INTERPRETED else TREES)
@pytest.mark.parametrize("kind", ["llama"] if INTERPRETED else ["llama", "qwen2"])
def test_identical_over_trees(kind, tree, models, heads, engine, prompts, references):
    model = models(kind)
    if kind not in references:
        references[kind] = tokens(generate(engine(model), prompts))
    expected = references[kind]
    paths = TREES[tree]
    llm = engine(model, **medusa(heads(max(map(len, paths))), paths))
    with oracle_drafts(Oracle(continuations(prompts, expected), VOCAB)) as oracle:
        assert tokens(generate(llm, prompts)) == expected
    # The oracle did its part: paths of every length, through all branches.
    assert len(oracle.lengths) == max(map(len, paths)) + 1
    assert len(oracle.branches) == len(paths) + 1
