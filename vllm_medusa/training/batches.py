"""What the heads see: the states of whole answers, what led on from each, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from vllm_medusa.training.answers import Answer
from vllm_medusa.training.model import IGNORE


class Batch(NamedTuple):
    """Rows of several answers, one for each token of them.

    Attributes:
        states: float32 [N, hidden], from which a token (the root) was drawn.
        paths: int64 [N, K], the root and the tokens behind it; 0 behind an answer's end.
        labels: int64 [N, K], what head k has to guess: the token k places behind the root;
            ``IGNORE`` behind an answer's end.
        lengths: int64 [answers], their tokens.
    """

    states: torch.Tensor
    paths: torch.Tensor
    labels: torch.Tensor
    lengths: torch.Tensor


def make_batch(items: Sequence[tuple[torch.Tensor, Answer]], num_heads: int) -> Batch:
    """A batch of answers and their states [tokens, hidden]."""
    paths, labels = [], []
    for _, answer in items:
        tokens = torch.tensor(answer.answer)
        behind = functional.pad(tokens, (0, num_heads), value=IGNORE).unfold(0, num_heads + 1, 1)
        paths.append(behind[:, :-1].clamp(min=0))
        labels.append(behind[:, 1:])
    return Batch(
        torch.cat([states.float() for states, _ in items]),
        torch.cat(paths),
        torch.cat(labels),
        torch.tensor([len(answer.answer) for _, answer in items]),
    )


def is_held_out(answer: Answer, share: float) -> bool:
    """Whether an answer's conversation is kept for validation: the same ones at every start."""
    # Fibonacci hashing: spreads consecutive line numbers evenly.
    return (answer.line * 2654435769) % 2**32 < share * 2**32
