"""Chains from the request's own text beside trees of the heads, in one batch."""

import random

import pytest

from tests.integration.generation import continuations, generate, medusa, runner_of, tokens
from tests.integration.tiny import VOCAB
from tests.integration.watch import watching
from vllm_medusa.runner import v1
from vllm_medusa.runner.v1 import HEADS_TREE, LOOKUP_CHAIN

TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0]]


@pytest.fixture
def prompts():
    return [[10 + n, 11, 12, 13 + n % 2] for n in range(8)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}])
def test_text_is_that_of_the_target(
    sampling, prompts, models, heads, engine, reference, monkeypatch
):
    """An oracle in the lookup's place: it knows what the target will say, offers a stretch of it of
    any length, wrong tokens behind, and sometimes nothing, so that the heads' tree is verified."""
    model = models()
    wanted = tokens(reference(model, prompts, **sampling))
    known = continuations(prompts, wanted)
    dice = random.Random(0)

    def foretell(text, num_tokens):
        prompt, said = tuple(text[:4].tolist()), text[4:].tolist()
        truth = known[prompt][len(said) :][:num_tokens]
        if known[prompt][: len(said)] != said or dice.random() < 0.3:
            return []
        right = dice.randrange(len(truth) + 1)
        return truth[:right] + [(token + 1) % VOCAB for token in truth[right:]]

    monkeypatch.setattr(v1, "lookup", foretell)
    speculating = engine(model, **medusa(heads(3), TREE, lookup=True))
    runner = runner_of(speculating)
    seen = set()
    remember = runner._remember_trees

    def watched(requests, repeating):
        remember(requests, repeating)
        names = runner.input_batch.req_ids
        seen.add(frozenset(runner.tree_of[names[index]] for index in requests))

    monkeypatch.setattr(runner, "_remember_trees", watched)
    with watching() as watch:
        assert tokens(generate(speculating, prompts, **sampling)) == wanted
    # Both kinds stood in one batch; chains were accepted to every depth, deeper than the tree is.
    assert frozenset({HEADS_TREE, LOOKUP_CHAIN}) in seen
    assert set(watch.lengths) == set(range(len(TREE) + 1))


def test_chains_are_what_came_before(models, heads, engine, reference):
    """The real lookup, on texts that go in circles from the prompt on."""
    prompts = [[10 + n, 11, 12, 13] * 6 for n in range(4)]
    speculating = engine(models(), **medusa(heads(3), TREE, lookup=True))
    with watching() as watch:
        found = tokens(generate(speculating, prompts))
    assert found == tokens(reference(models(), prompts))
    assert watch.num_nodes[len(TREE)] > 0


def test_it_can_be_switched_off(prompts, models, heads, engine):
    speculating = engine(models(), **medusa(heads(3), TREE))
    generate(speculating, prompts)
    assert set(runner_of(speculating).tree_of.values()) == {HEADS_TREE}


def test_finished_requests_are_forgotten(prompts, models, heads, engine):
    speculating = engine(models(), **medusa(heads(3), TREE, lookup=True))
    for number in range(3):
        generate(speculating, prompts[number : number + 2], max_tokens=10)
    assert len(runner_of(speculating).tree_of) <= 2
