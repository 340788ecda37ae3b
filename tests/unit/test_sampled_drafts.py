"""Drawing drafts and trying them: by enumeration, and by counting many draws."""

import itertools

import pytest
import torch

from tests.integration.distribution import chance_of
from vllm_medusa import sampled_drafts
from vllm_medusa.acceptance import NO_TOKEN
from vllm_medusa.sampled_drafts import DrawnTree, accept_drawn, draw_distinct

NUM_DRAWS = 300_000

# Target and draft: near each other, far from each other, zeros in either, the same, one token.
PAIRS = {
    "near": ([0.4, 0.3, 0.2, 0.05, 0.05], [0.35, 0.2, 0.3, 0.1, 0.05]),
    "far": ([0.02, 0.08, 0.1, 0.2, 0.6], [0.6, 0.3, 0.06, 0.03, 0.01]),
    "ruled out": ([0.5, 0.0, 0.5, 0.0, 0.0], [0.3, 0.3, 0.2, 0.1, 0.1]),
    "never drafted": ([0.1, 0.2, 0.3, 0.2, 0.2], [0.5, 0.5, 0.0, 0.0, 0.0]),
    "the same": ([0.1, 0.2, 0.3, 0.2, 0.2], [0.1, 0.2, 0.3, 0.2, 0.2]),
    "certain": ([0.0, 0.0, 1.0, 0.0, 0.0], [0.9, 0.1, 0.0, 0.0, 0.0]),
}


def chance_of_tokens(tokens, expected):
    """The chance to see counts of tokens this far or farther from what is expected."""
    expected = torch.as_tensor(expected, dtype=torch.float64)
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    if counts[expected == 0].sum():
        return 0.0
    counts, expected = counts[expected > 0], expected[expected > 0] * len(tokens)
    return chance_of(counts, expected)


def orders(draft, number):
    """Every order of so many tokens drawn without replacement, and its chance."""
    support = [token for token, chance in enumerate(draft) if chance > 0]
    for tokens in itertools.permutations(support, min(number, len(support))):
        chance, left = 1.0, sum(draft)
        for token in tokens:
            chance *= draft[token] / left
            left -= draft[token]
        yield tokens, chance


def by_the_rule(target, draft, children):
    """The distribution of the token that comes out, as the rule is written, for given children."""
    p, q = list(target), list(draft)
    result, reached = [0.0] * len(p), 1.0
    for child in children:
        accepted = min(1.0, p[child] / q[child])
        result[child] += reached * accepted
        reached *= 1 - accepted
        if reached < 1e-12:
            return result
        left = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
        p = [a / sum(left) for a in left]
        q[child] = 0.0
        q = [b / sum(q) for b in q] if sum(q) else q
    return [have + reached * a for have, a in zip(result, p, strict=True)]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_rule_is_exact_by_enumeration(name, number):
    target, draft = PAIRS[name]
    total = torch.zeros(len(target), dtype=torch.float64)
    for children, chance in orders(draft, number):
        total += chance * torch.tensor(by_the_rule(target, draft, children), dtype=torch.float64)
    assert torch.allclose(total, torch.tensor(target, dtype=torch.float64))


def many(probs):
    return torch.tensor(probs).expand(NUM_DRAWS, -1)


@pytest.mark.parametrize("name", PAIRS)
def test_given_children(name):
    """Each order of children by itself: what comes out is what the written rule says."""
    torch.manual_seed(0)
    target, draft = PAIRS[name]
    for children, _ in itertools.islice(orders(draft, 3), 12):
        # In any columns, others empty.
        columns = [NO_TOKEN, *children[:1], NO_TOKEN, *children[1:]]
        drafts = torch.tensor(columns).expand(NUM_DRAWS // 4, -1)
        size = NUM_DRAWS // 4
        tokens = accept_drawn(many(target)[:size], many(draft)[:size], drafts, {})
        assert chance_of_tokens(tokens, by_the_rule(target, draft, children)) > 1e-5, children


@pytest.mark.parametrize("number", [1, 2, 3])
def test_draws_are_without_replacement(number):
    torch.manual_seed(1)
    draft = [0.5, 0.2, 0.0, 0.2, 0.1]
    drawn = draw_distinct(many(draft), number, {})
    assert (drawn != 2).all()  # never drawn while others are left
    codes = (drawn * 5 ** torch.arange(number)).sum(dim=1)
    expected = torch.zeros(5**number, dtype=torch.float64)
    for tokens, chance in orders(draft, number):
        expected[sum(token * 5**place for place, token in enumerate(tokens))] = chance
    assert chance_of_tokens(codes, expected) > 1e-4


def come_out(name, number):
    """The chance of what comes out when children are drawn and tried."""
    torch.manual_seed(2)
    target, draft = PAIRS[name]
    children = sampled_drafts.draw_distinct(many(draft), number, {})
    return chance_of_tokens(accept_drawn(many(target), many(draft), children, {}), target)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_what_comes_out_is_the_target(name, number):
    assert come_out(name, number) > 1e-4


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("rule", ["no residual", "not normalised", "tried backwards"])
def test_broken_rules_are_found(rule, number, monkeypatch):
    if rule == "no residual":
        monkeypatch.setattr(sampled_drafts, "_normalised", lambda weights, otherwise: otherwise)
    elif rule == "not normalised":
        monkeypatch.setattr(sampled_drafts, "_normalised", lambda weights, otherwise: weights)
    else:

        def backwards(*arguments):
            return draw_distinct(*arguments).flip(-1)

        monkeypatch.setattr(sampled_drafts, "draw_distinct", backwards)
    # One child has no order, and is tried before anything is normalised.
    is_broken = number == 2 or rule == "no residual"
    assert (come_out("near", number) < 1e-6) == is_broken


def test_a_child_that_was_not_drawn_is_none():
    """More children than tokens that q allows: the last ones are not accepted as drafts."""
    torch.manual_seed(3)
    children = torch.tensor([0, 1, 4, 3]).expand(NUM_DRAWS, -1)
    target, draft = PAIRS["never drafted"]
    tokens = accept_drawn(many(target), many(draft), children, {})
    assert chance_of_tokens(tokens, by_the_rule(target, draft, [0, 1])) > 1e-4


def test_own_generators():
    probs = torch.tensor([[0.6, 0.3, 0.1]] * 3)
    children = torch.tensor([[0, 1]] * 3)

    def once(seed):
        torch.manual_seed(seed)
        generators = {1: torch.Generator().manual_seed(5)}
        drawn = [draw_distinct(probs, 2, generators)[1] for _ in range(20)]
        tokens = [accept_drawn(probs.flip(1), probs, children, generators)[1] for _ in range(20)]
        return torch.stack(drawn), torch.stack(tokens)

    for here, there in zip(once(0), once(1), strict=True):
        assert torch.equal(here, there)
        assert len(here.unique(dim=0)) > 1


def test_the_distribution_of_a_rows_children():
    tree = DrawnTree(
        torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([0, 1, 0]), torch.tensor([3, 1])
    )
    assert tree.at(0, 5).tolist() == [0, 0.75, 0, 0.25, 0]
    assert tree.at(1, 5).tolist() == [0, 0.5, 0, 0.5, 0]
