"""What ranks send each other: formulas against rings that numbers are really sent around."""

from pathlib import Path

import numpy as np
import pytest

from vllm_medusa.bench import communication
from vllm_medusa.bench.communication import ALL_GATHER, ALL_REDUCE, BROADCAST, Collective

PAGE = Path(__file__).parents[2] / "docs" / "ray.md"


class Ring:
    """Ranks that can each send to the next one only; counts what each sends."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.sent = [0] * ranks

    def send(self, messages):
        """Every rank sends an array, or None; returns what every rank receives."""
        for rank, message in enumerate(messages):
            self.sent[rank] += 0 if message is None else message.nbytes
        return [messages[rank - 1] for rank in range(self.ranks)]

    def pass_on(self, parts, first, combine):
        """In ranks - 1 rounds every rank sends the part it has last received, then the one before.

        ``parts[rank][part]`` are arrays; ``first`` says which part each rank begins with.
        """
        for turn in range(self.ranks - 1):
            sending = [(first(rank) - turn) % self.ranks for rank in range(self.ranks)]
            received = self.send([parts[rank][sending[rank]] for rank in range(self.ranks)])
            for rank, array in enumerate(received):
                part = sending[rank - 1]
                parts[rank][part] = combine(parts[rank][part], array)

    def all_reduce(self, inputs):
        parts = [list(np.array_split(values, self.ranks)) for values in inputs]
        self.pass_on(parts, lambda rank: rank, lambda own, array: own + array)
        self.pass_on(parts, lambda rank: rank + 1, lambda own, array: array)
        return [np.concatenate(part) for part in parts]

    def all_gather(self, inputs):
        parts = [[None] * self.ranks for _ in inputs]
        for rank, values in enumerate(inputs):
            parts[rank][rank] = values
        self.pass_on(parts, lambda rank: rank, lambda own, array: array)
        return [np.concatenate(part) for part in parts]

    def broadcast(self, values):
        held = [values] + [None] * (self.ranks - 1)
        for rank in range(self.ranks - 1):
            messages = [held[rank] if other == rank else None for other in range(self.ranks)]
            held[rank + 1] = self.send(messages)[rank + 1]
        return held


@pytest.mark.parametrize("ranks", communication.RANKS)
def test_bytes_sent_around_a_ring(ranks):
    numbers = np.random.default_rng(0)
    inputs = [numbers.integers(0, 100, 24) for _ in range(ranks)]
    size = inputs[0].nbytes
    for name, expected in {
        ALL_REDUCE: sum(inputs),
        ALL_GATHER: np.concatenate(inputs),
        BROADCAST: inputs[0],
    }.items():
        ring = Ring(ranks)
        results = getattr(ring, name)(inputs[0] if name == BROADCAST else inputs)
        assert all((result == expected).all() for result in results), name
        assert max(ring.sent) == communication.bytes_sent(Collective(name, size), ranks), name


def test_the_page_shows_the_table():
    assert communication.BEGIN in PAGE.read_text()
    assert communication.main([str(PAGE), "--check"]) == 0, "run make communication"
