"""Answers with the time of every step, and what follows from them. No engine in sight."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
        token_ids: the answer's tokens.
        counts: tokens known after each step that brought some; the first step is the prefill's.
        times: seconds from the batch's arrival to the end of each of these steps.
    """

    token_ids: list[int]
    counts: list[int]
    times: list[float]


Batch = Sequence[Generation]
"""Answers to requests that arrived together."""


def decoding_speed(batch: Batch) -> float:
    """Tokens per second from when all have their first token to the end; nan if that is at once.

    With one request: the speed of decoding, without the prefill.
    """
    started = max(answer.times[0] for answer in batch)
    ended = max(answer.times[-1] for answer in batch)
    known = 0
    for answer in batch:
        steps = sum(time <= started for time in answer.times)
        known += answer.counts[steps - 1]
    tokens = sum(answer.counts[-1] for answer in batch) - known
    return tokens / (ended - started) if tokens else float("nan")


def overall_speed(batch: Batch) -> float:
    """Tokens per second from the arrival to the end, prefills included."""
    ended = max(answer.times[-1] for answer in batch)
    return sum(answer.counts[-1] for answer in batch) / ended


def tokens_per_step(answers: Sequence[Generation]) -> float:
    """Tokens per decoding step, 1 without speculation; nan without a decoding step."""
    tokens = sum(answer.counts[-1] - answer.counts[0] for answer in answers)
    steps = sum(len(answer.counts) - 1 for answer in answers)
    return tokens / steps if steps else float("nan")


def accepted_per_depth(answers: Sequence[Generation]) -> list[float]:
    """Entry d: the share of decoding steps that kept at least d + 1 drafted tokens."""
    lengths = Counter(
        after - before - 1
        for answer in answers
        for before, after in zip(answer.counts, answer.counts[1:], strict=False)
    )
    steps = sum(lengths.values())
    return [
        sum(count for length, count in lengths.items() if length >= depth) / steps
        for depth in range(1, max(lengths, default=0) + 1)
    ]


def step_seconds(answers: Sequence[Generation]) -> list[float]:
    """Seconds of each decoding step."""
    return [
        after - before
        for answer in answers
        for before, after in zip(answer.times, answer.times[1:], strict=False)
    ]


def seconds_per_token(answers: Sequence[Generation]) -> list[float]:
    """Of each answer, seconds between two tokens on average, the first one's wait left out."""
    return [
        (answer.times[-1] - answer.times[0]) / (answer.counts[-1] - answer.counts[0])
        for answer in answers
        if answer.counts[-1] > answer.counts[0]
    ]


def first_token_seconds(answers: Sequence[Generation]) -> list[float]:
    """Of each answer, seconds until its first token."""
    return [answer.times[0] for answer in answers]


Parts = dict[str, float]
"""Seconds of a decoding step, by part; the whole is "step"."""


def median_parts(steps: Sequence[Parts]) -> Parts:
    """The median of each part over some steps; a part that a step lacks took no time there."""
    names = {name: None for step in steps for name in step}
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
