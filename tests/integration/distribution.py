"""What the first tokens behind a prompt should be distributed as, and whether texts are."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

SMALL_VOCAB = 16
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
# Options of a model with weights small enough for a lively distribution.
LIVELY: dict[str, object] = {
    "vocab_size": SMALL_VOCAB,
    "initializer_range": 0.15,
    "eos_token_id": None,
}


def exact_logits(model: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits after the prompt and 0, 1 or 2 further tokens, float64 [..., vocabulary]."""
    import transformers

    target = transformers.AutoModelForCausalLM.from_pretrained(model).double()
    pairs = list(itertools.product(range(SMALL_VOCAB), repeat=2))
    with torch.no_grad():
        found = target(torch.tensor([PROMPT + list(pair) for pair in pairs])).logits
    found = found[:, len(PROMPT) - 1 :].unflatten(0, (SMALL_VOCAB, SMALL_VOCAB))
    return found[0, 0, 0], found[:, 0, 1], found[:, :, 2]


def probabilities(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> torch.Tensor:
    """What vLLM makes of the logits, in its order: temperature, min-p, top-k, top-p."""
    logits = logits / temperature
    chances = logits.softmax(dim=-1)
    logits = logits.masked_fill(chances < min_p * chances.amax(-1, keepdim=True), -torch.inf)
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    chances, order = logits.softmax(dim=-1).sort(dim=-1)
    dropped = chances.cumsum(dim=-1) <= 1 - top_p
    dropped[..., -1] = False
    dropped = torch.zeros_like(dropped).scatter(-1, order, dropped)
    return logits.masked_fill(dropped, -torch.inf).softmax(dim=-1)


def exact_distribution(logits: Sequence[torch.Tensor], setting: dict[str, float]) -> torch.Tensor:
    """Probability of every triple of first tokens, [vocabulary ** 3]."""
    first, second, third = (probabilities(part, **setting) for part in logits)
    return (first[:, None, None] * second[:, :, None] * third).flatten()


def chi_square(texts: Sequence[list[int]], expected: torch.Tensor) -> float:
    """The chance to see counts this far or farther from what is expected."""
    triples = torch.tensor([text[:3] for text in texts])
    codes = (triples * SMALL_VOCAB ** torch.tensor([2, 1, 0])).sum(dim=1)
    counts = torch.bincount(codes, minlength=SMALL_VOCAB**3).double()
    if counts[expected == 0].sum():
        return 0.0
    expected = expected * len(texts)
    # Outcomes that are too rare by themselves are counted together.
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    keep = expected > 0
    expected, counts = expected[keep], counts[keep]
    return chance_of(counts, expected)


def chi_square_of_each(texts: Sequence[list[int]], expected: torch.Tensor) -> float:
    """As ``chi_square``, of first, second and third tokens by themselves, for texts that are too
    few to count triples: the smallest of three chances."""
    shape = (SMALL_VOCAB,) * 3
    chances = []
    for place in range(3):
        others = [other for other in range(3) if other != place]
        wanted = expected.view(shape).sum(dim=others) * len(texts)
        said = torch.tensor([text[place] for text in texts])
        counts = torch.bincount(said, minlength=SMALL_VOCAB).double()
        if counts[wanted == 0].sum():
            return 0.0
        often = wanted >= 5
        assert often.sum() >= 5
        counts = torch.cat([counts[often], counts[~often].sum()[None]])
        wanted = torch.cat([wanted[often], wanted[~often].sum()[None]])
        chances.append(chance_of(counts[wanted > 0], wanted[wanted > 0]))
    return min(chances)


def chance_of(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """The chance to see counts this far or farther from what is expected, both float64 [kinds]
    (Pearson's chi-square)."""
    distance = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor(max(len(expected) - 1, 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, distance / 2))
