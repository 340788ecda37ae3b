"""The paired measurement: every prompt through every engine, one after the other.

The order rotates from prompt to prompt, so that no variant always runs in another's wake. A round
beside which other processes were busy is measured again, a few times at most, and flagged if it
stays so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_medusa.demo.engine import Engine, Generation, Variant
from vllm_medusa.demo.prompts import Prompt

MAX_TOKENS = 128

# Cores kept busy by others, on average, from which on a round counts as disturbed.
DISTURBED = 0.1

# Repetitions of disturbed rounds in a whole measurement, so that a busy machine can't hold it up.
MAX_REPEATS = 6

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Round:
    """One prompt, answered by every variant: the generations are in the order of the variants."""

    prompt: Prompt
    generations: list[Generation]

    @property
    def others(self) -> float:
        """Cores other processes kept busy in the most disturbed of the generations."""
        return max(generation.others for generation in self.generations)

    @property
    def disturbed(self) -> bool:
        return self.others > DISTURBED


@contextlib.contextmanager
def running_engines(
    variants: list[Variant], model: Path, progress: Progress, **options: Any
) -> Iterator[list[Engine]]:
    """Engines for all variants, each started and warmed up by a first request."""
    engines = [Engine(variant, model, options) for variant in variants]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            progress(f"starting vLLM: {engine.variant.name}")
            stack.callback(engine.stop)
            engine.start()
            engine.generate(["Hello!"], max_tokens=8)
        yield engines


def measure(engines: list[Engine], prompts: list[Prompt], progress: Progress) -> list[Round]:
    """A round for every prompt."""
    repeats = MAX_REPEATS
    rounds = []
    for number, prompt in enumerate(prompts):
        progress(f"prompt {number + 1} of {len(prompts)}: {prompt.name}")
        best = measure_round(engines, prompt, first=number)
        while best.disturbed and repeats > 0:
            repeats -= 1
            progress(f"{prompt.name} again: other processes kept {best.others:.2f} cores busy")
            best = min(best, measure_round(engines, prompt, first=number), key=lambda r: r.others)
        rounds.append(best)
    return rounds


def measure_round(engines: list[Engine], prompt: Prompt, first: int) -> Round:
    """One prompt through all engines, beginning with engine `first` (modulo their number)."""
    generations: dict[int, Generation] = {}
    for step in range(len(engines)):
        index = (first + step) % len(engines)
        generations[index] = engines[index].generate([prompt.text], MAX_TOKENS)[0]
    return Round(prompt, [generations[index] for index in range(len(engines))])
