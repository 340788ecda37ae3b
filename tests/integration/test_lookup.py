"""Chains from the request's own text beside trees of the heads, in one batch."""

import pytest

from tests.integration.generation import generate, medusa, runner_of, tokens
from tests.integration.watch import watching
from vllm_medusa.runner.v1 import HEADS_TREE, LOOKUP_CHAIN

TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0]]


@pytest.fixture
def prompts():
    """Half of them repeat themselves; this target's texts then go on in circles."""
    circle = [[10 + n, 11, 12, 13] * 6 for n in range(4)]
    return circle + [[20 + n, 5, 99, 7] for n in range(4)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}])
def test_text_is_that_of_the_target(sampling, prompts, models, heads, engine, reference):
    model = models()
    speculating = engine(model, **medusa(heads(3), TREE, lookup=True))
    runner = runner_of(speculating)
    seen = set()
    remember = type(runner)._remember_trees

    def watched(self, requests, repeating):
        remember(self, requests, repeating)
        names = self.input_batch.req_ids
        seen.add(frozenset(self.tree_of[names[index]] for index in requests))

    type(runner)._remember_trees = watched
    try:
        with watching() as watch:
            found = tokens(generate(speculating, prompts, **sampling))
    finally:
        type(runner)._remember_trees = remember
    assert found == tokens(reference(model, prompts, **sampling))
    # Both kinds stood in one batch, and chains were accepted deeper than any tree is.
    assert frozenset({HEADS_TREE, LOOKUP_CHAIN}) in seen
    if not sampling:
        assert max(watch.lengths) > 3


def test_it_can_be_switched_off(prompts, models, heads, engine):
    speculating = engine(models(), **medusa(heads(3), TREE))
    generate(speculating, prompts)
    assert set(runner_of(speculating).tree_of.values()) == {HEADS_TREE}


def test_finished_requests_are_forgotten(prompts, models, heads, engine):
    speculating = engine(models(), **medusa(heads(3), TREE, lookup=True))
    for number in range(3):
        generate(speculating, prompts[number : number + 2], max_tokens=10)
    assert len(runner_of(speculating).tree_of) <= 2
