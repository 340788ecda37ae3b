"""Drawing drafts and trying them: by enumeration, and by counting many draws."""

import itertools

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.distribution import chance_of
from vllm_medusa import sampled_drafts
from vllm_medusa.acceptance import NO_TOKEN
from vllm_medusa.sampled_drafts import (
    DraftProbs,
    DraftSampling,
    draft_probs,
    draw_distinct,
    draws_drafts,
    exponential,
    try_children,
    uniform,
)

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


def draw(probs, number, generators=None):
    """Columns that are drawn without replacement from rows of ``probs``."""
    noise = exponential(tuple(probs.shape), generators or {}, probs.device)
    return sampled_drafts.draw_distinct(probs, number, noise)


def accept(target, draft, children, generators=None):
    """The tokens that come out where children are tried; candidates are the tokens that the draft
    allows, best first, and maybe others."""
    order = draft.argsort(dim=1, descending=True)
    candidates = DraftProbs(draft.gather(1, order), order)
    if (draft[0] == 0).any():
        size = int((draft[0] > 0).sum())
        candidates = DraftProbs(*(values[:, :size] for values in candidates))
    chances = uniform(tuple(children.shape), generators or {}, target.device)
    accepted, left = try_children(target, candidates, children, chances)
    return torch.where(accepted == NO_TOKEN, draw(left, 1, generators)[:, 0], accepted)


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
        tokens = accept(many(target)[:size], many(draft)[:size], drafts)
        assert chance_of_tokens(tokens, by_the_rule(target, draft, children)) > 1e-5, children


@pytest.mark.parametrize("number", [1, 2, 3])
def test_draws_are_without_replacement(number):
    torch.manual_seed(1)
    draft = [0.5, 0.2, 0.0, 0.2, 0.1]
    drawn = draw(many(draft), number)
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
    children = draw(many(draft), number)
    return chance_of_tokens(accept(many(target), many(draft), children), target)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("number", [0, 1, 2, 4])
def test_what_comes_out_is_the_target(name, number):
    assert come_out(name, number) > 1e-4


RULES = ["no residual", "nothing taken out", "not normalised", "tried backwards"]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_broken_rules_are_found(rule, number, monkeypatch):
    if rule == "no residual":
        monkeypatch.setattr(sampled_drafts, "_residual", lambda p, q: p)
    elif rule == "nothing taken out":
        monkeypatch.setattr(sampled_drafts, "_without", lambda q, taken: q)
    elif rule == "not normalised":

        def taken_out(q, taken):
            return q.masked_fill(taken, 0)

        monkeypatch.setattr(sampled_drafts, "_without", taken_out)
    else:

        def backwards(*arguments):
            return draw_distinct(*arguments).flip(-1)

        monkeypatch.setattr(sampled_drafts, "draw_distinct", backwards)
    # One child has no order, and is tried before anything is taken out.
    is_broken = number == 2 or rule == "no residual"
    assert (come_out("near", number) < 1e-6) == is_broken


def test_a_child_that_was_not_drawn_is_none():
    """More children than tokens that q allows: the last ones are not accepted as drafts."""
    torch.manual_seed(3)
    children = torch.tensor([0, 1, 4, 3]).expand(NUM_DRAWS, -1)
    target, draft = PAIRS["never drafted"]
    tokens = accept(many(target), many(draft), children)
    assert chance_of_tokens(tokens, by_the_rule(target, draft, [0, 1])) > 1e-4


def test_nothing_left():
    """Where the target is the draft, a child is accepted; if rounding has it that it is not, what
    the target rules out stays ruled out."""
    probs = torch.tensor([[0.7, 0.3, 0.0, 0.0]])
    draft = DraftProbs(probs[:, :2] * (1 + 1e-6), torch.tensor([[0, 1]]))
    just_below_one = torch.tensor([[1 - 2**-24, 1 - 2**-24]])
    accepted, left = try_children(probs, draft, torch.tensor([[0, 1]]), just_below_one)
    assert accepted.tolist() == [NO_TOKEN]
    assert left[0, 2:].tolist() == [0, 0]
    assert left[0, :2].sum() > 0


def test_own_generators():
    probs = torch.tensor([[0.6, 0.3, 0.1]] * 3)
    children = torch.tensor([[0, 1]] * 3)

    def once(seed):
        torch.manual_seed(seed)
        generators = {1: torch.Generator().manual_seed(5)}
        drawn = [draw(probs, 2, generators)[1] for _ in range(20)]
        tokens = [accept(probs.flip(1), probs, children, generators)[1] for _ in range(20)]
        return torch.stack(drawn), torch.stack(tokens)

    for here, there in zip(once(0), once(1), strict=True):
        assert torch.equal(here, there)
        assert len(here.unique(dim=0)) > 1


def test_what_drafts_are_drawn_from():
    logits = torch.tensor([[[3.0, 2.0, 1.0, 0.0]]]).expand(4, 1, 4)
    sampling = DraftSampling(
        temperature=torch.tensor([2.0, 1.0, 1.0, 0.0]),
        top_k=torch.tensor([99, 2, 99, 1]),
        top_p=torch.tensor([1.0, 1.0, 0.7, 0.0]),
    )
    hot, top_2, top_p, one = draft_probs(logits, sampling)[:, 0]
    assert torch.allclose(hot, torch.tensor([1.5, 1.0, 0.5, 0.0]).softmax(dim=0))
    # Chances of 0.644, 0.237, ...: 0.7 is reached with the second.
    for cut in (top_2, top_p):
        assert torch.allclose(cut, torch.tensor([3.0, 2.0, -torch.inf, -torch.inf]).softmax(dim=0))
    assert one.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("methods", "params"),
    [
        ([], {"temperature": 0.0}),
        (["probabilistic", "auto"], {"temperature": 1.0}),
        (["probabilistic", "auto"], {"temperature": 1.2, "top_p": 0.9}),
        (["probabilistic"], {"temperature": 0.99}),
        (["probabilistic"], {"temperature": 1.0, "seed": 0}),
        ([], {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(choice=["a"])}),
    ],
)
def test_whose_drafts_are_drawn(methods, params):
    asked = SamplingParams(**params)
    found = [name for name in ("greedy", "probabilistic", "auto") if draws_drafts(name, asked)]
    assert found == methods
