"""What is measured, in which order, and the file it is kept in while the benchmark runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_medusa.bench.generation import Generation, Parts
from vllm_medusa.demo.prompts import Prompt
from vllm_medusa.whole_file import read_whole_lines

# Cores kept busy by others, on average, from which on a round counts as disturbed.
DISTURBED = 0.1


class BenchError(ValueError):
    """The benchmark cannot go on; the message says what to do."""


@dataclass(frozen=True)
class Task:
    """Prompts that arrive together, and how they are to be answered.

    Attributes:
        kind: the set the prompts come from.
        temperature: of sampling.
        prompts: as many as the concurrency.
    """

    kind: str
    temperature: float
    prompts: tuple[Prompt, ...]

    @property
    def concurrency(self) -> int:
        return len(self.prompts)

    @property
    def name(self) -> str:
        """Unlike that of any other task in a plan."""
        others = f" and {len(self.prompts) - 1} more" if len(self.prompts) > 1 else ""
        return f"{self.kind}, temperature {self.temperature:g}: {self.prompts[0].name}{others}"


@dataclass(frozen=True)
class Round:
    """A task, done by every variant.

    Attributes:
        task: the task's name.
        kind: the set its prompts come from.
        temperature: of sampling.
        batches: the answers of each variant, in the order of the variants.
        others: for each variant, the cores that other processes kept busy meanwhile.
        seconds: what the round took.
        parts: for each variant, the parts of its median decoding step; empty where they were not
            measured.
    """

    task: str
    kind: str
    temperature: float
    batches: list[list[Generation]]
    others: list[float]
    seconds: float
    parts: list[Parts] = field(default_factory=list)

    @property
    def concurrency(self) -> int:
        return len(self.batches[0])

    @property
    def disturbed(self) -> bool:
        return max(self.others) > DISTURBED


def plan(
    prompts: Mapping[str, Sequence[Prompt]],
    temperatures: Sequence[float],
    concurrency: Sequence[int],
) -> list[Task]:
    """All tasks, the sets taking turns.

    Each set is cut into groups of `concurrency` prompts. A group that would be short is left out,
    except where it is the only one: then the set's prompts are asked again until it is full.

    Args:
        prompts: by set.
        temperatures: of sampling.
        concurrency: numbers of requests that arrive together.
    """
    tasks = []
    for size in concurrency:
        for temperature in temperatures:
            groups = {kind: grouped(members, size) for kind, members in prompts.items()}
            for number in range(max(map(len, groups.values()))):
                tasks += [
                    Task(kind, temperature, members[number])
                    for kind, members in groups.items()
                    if number < len(members)
                ]
    return tasks


def grouped(prompts: Sequence[Prompt], size: int) -> list[tuple[Prompt, ...]]:
    """Groups of `size` prompts."""
    if len(prompts) < size:
        return [tuple(prompts[number % len(prompts)] for number in range(size))]
    return [tuple(prompts[at : at + size]) for at in range(0, len(prompts) - size + 1, size)]


class RoundFile:
    """Finished rounds in a JSON lines file, one a line below the settings they were made with.

    So a benchmark that was stopped goes on where it was.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Open the file, or start it.

        Args:
            path: the file.
            settings: what must be the same for old and new rounds to stand side by side.

        Raises:
            BenchError: it holds rounds made with other settings.
        """
        self.path = path
        self.rounds: list[Round] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = read_whole_lines(path)
        if not lines:
            self._write(settings)
            return
        first, *others = map(json.loads, lines)
        settings = json.loads(json.dumps(settings))
        changed = sorted(
            key for key in settings.keys() | first.keys() if settings.get(key) != first.get(key)
        )
        if changed:
            raise BenchError(
                f"{path} holds rounds made with other settings ({', '.join(changed)}). To go on "
                "with them, repeat the settings; to start anew, give another folder with --output "
                "or delete the file."
            )
        self.rounds = [round_from_json(line) for line in others]

    def append(self, done: Round) -> None:
        """Keep a round."""
        self._write(asdict(done))
        self.rounds.append(done)

    def _write(self, entry: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def round_from_json(entry: dict[str, Any]) -> Round:
    """A round as `asdict` left it."""
    batches = [[Generation(**answer) for answer in batch] for batch in entry.pop("batches")]
    return Round(**entry, batches=batches)
