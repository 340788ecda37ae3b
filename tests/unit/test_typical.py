"""The rule of typical acceptance, against the paper's formula in plain Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_medusa import typical
from vllm_medusa.acceptance import NO_TOKEN
from vllm_medusa.typical import TypicalBars, typical_tokens

VOCAB = 6


@st.composite
def rows(draw):
    """A distribution with zeros in it, children at a row, a drawn token, and a bar."""
    weights = draw(st.lists(st.sampled_from([0, 1, 2, 5, 30]), min_size=VOCAB, max_size=VOCAB))
    weights[draw(st.integers(0, VOCAB - 1))] += 1
    children = draw(st.lists(st.integers(-1, VOCAB - 1), min_size=4, max_size=4))
    drawn = draw(st.sampled_from([token for token in range(VOCAB) if weights[token]]))
    bars = draw(st.sampled_from([0.01, 0.09, 0.3, 1.0])), draw(st.sampled_from([0.05, 0.3, 1.0]))
    return [weight / sum(weights) for weight in weights], children, drawn, bars


def paper(chances, children, drawn, bars):
    """Which tokens the walk may go on with: section 2.3.1 of the paper, at one node."""
    entropy = -sum(chance * math.log(chance) for chance in chances if chance)
    bar = min(bars[0], bars[1] * math.exp(-entropy))
    accepted = {child for child in children if child != NO_TOKEN and chances[child] > bar}
    if drawn in children or not accepted:
        return {drawn}
    best = max(chances[child] for child in accepted)
    return {child for child in accepted if chances[child] == best}


def ties_with_the_bar(chances, bars):
    """Whether rounding decides: some probability is the bar, but for the last bits."""
    entropy = -sum(chance * math.log(chance) for chance in chances if chance)
    bar = min(bars[0], bars[1] * math.exp(-entropy))
    return any(math.isclose(chance, bar, rel_tol=1e-5) for chance in chances)


@settings(max_examples=500, deadline=None)
@given(rows())
def test_rule(row):
    chances, children, drawn, bars = row
    if ties_with_the_bar(chances, bars):
        return
    found = typical_tokens(
        torch.tensor([chances]), torch.tensor([children]), torch.tensor([drawn]), TypicalBars(*bars)
    )
    assert int(found) in paper(*row)
    assert chances[int(found)] > 0


def test_rows_do_not_mix():
    probs = torch.tensor([[0.6, 0.3, 0.1, 0.0], [0.25, 0.25, 0.25, 0.25]])
    children = torch.tensor([[NO_TOKEN, 1], [3, NO_TOKEN]])
    drawn = torch.tensor([0, 2])
    # exp(-entropy) is 0.41 and 0.25: 1 is typical at the first row, 3 with a lower bar only.
    assert typical_tokens(probs, children, drawn, TypicalBars(0.09, 0.3)).tolist() == [1, 3]
    assert typical_tokens(probs, children, drawn, TypicalBars(0.28, 1.0)).tolist() == [1, 2]
    assert typical_tokens(probs, children, drawn, TypicalBars(0.9, 1.0)).tolist() == [0, 2]


@pytest.mark.parametrize("entropy", ["in bits", "left out"])
def test_another_entropy_is_found(entropy, monkeypatch):
    """The comparison with the paper has teeth."""

    class Special:
        @staticmethod
        def entr(probs):
            right = -torch.xlogy(probs, probs)
            return right / math.log(2) if entropy == "in bits" else right * 0

    class Broken:
        special = Special

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(typical, "torch", Broken())
    with pytest.raises(AssertionError):
        test_rule()
