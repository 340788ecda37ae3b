"""The paired measurement: every task through every engine, one after the other.

The order rotates from task to task, so that no variant always runs in another's wake. A round
beside which other processes were busy is measured again, a few times at most, and flagged if it
stays so.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_medusa.bench.engine import Engine
from vllm_medusa.bench.environment import memory_options
from vllm_medusa.bench.generation import Generation, Parts
from vllm_medusa.bench.progress import Progress
from vllm_medusa.bench.rounds import Round, RoundFile, Task
from vllm_medusa.bench.variants import Variant
from vllm_medusa.demo.prompts import Prompt

# Repetitions of disturbed rounds, of each round and as a share of all: a busy machine can't hold a
# measurement up.
REPEATS_PER_ROUND = 2
REPEATS_PER_TASK = 0.5


@contextlib.contextmanager
def running_engines(
    variants: Sequence[Variant],
    model: str,
    progress: Progress,
    chat_template: str | None = None,
    **options: Any,
) -> Iterator[list[Engine]]:
    """Engines for all variants, each started and warmed up by a first request; on a GPU they share
    its memory evenly."""
    from vllm.platforms import current_platform

    options = memory_options(len(variants), current_platform.is_cuda_alike()) | options
    engines = [Engine(variant, model, options, chat_template) for variant in variants]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            progress(f"starting vLLM: {engine.variant.name}")
            stack.callback(engine.stop)
            engine.start()
            engine.generate([Prompt("warm-up", "", "Hello!")], max_tokens=8)
        yield engines


def measure(
    engines: Sequence[Engine],
    tasks: Sequence[Task],
    max_tokens: int,
    done: RoundFile,
    progress: Progress,
) -> None:
    """A round for every task that has none yet."""
    finished = {each.task: each for each in done.rounds}
    repeats = math.ceil(REPEATS_PER_TASK * len(tasks))
    for number, task in enumerate(tasks):
        if task.name in finished:
            continue
        left = seconds_left(tasks[number:], done.rounds)
        progress(f"round {number + 1} of {len(tasks)} ({left}): {task.name}")
        best = measure_round(engines, task, max_tokens, first=number)
        for _ in range(min(repeats, REPEATS_PER_ROUND)):
            if not best.disturbed:
                break
            repeats -= 1
            progress(f"{task.name} again: others kept {max(best.others):.2f} cores busy")
            again = measure_round(engines, task, max_tokens, first=number)
            best = min(best, again, key=lambda each: max(each.others))
        done.append(best)


def measure_round(engines: Sequence[Engine], task: Task, max_tokens: int, first: int) -> Round:
    """One task through all engines, beginning with engine `first` (modulo their number)."""
    answers: dict[int, tuple[list[Generation], Parts, float]] = {}
    started = time.monotonic()
    for turn in range(len(engines)):
        index = (first + turn) % len(engines)
        answers[index] = engines[index].generate(task.prompts, max_tokens, task.temperature)
    ordered = [answers[index] for index in range(len(engines))]
    return Round(
        task.name,
        task.kind,
        task.temperature,
        batches=[batch for batch, _, _ in ordered],
        others=[others for _, _, others in ordered],
        seconds=time.monotonic() - started,
        parts=[parts for _, parts, _ in ordered],
    )


def seconds_left(tasks: Sequence[Task], rounds: Sequence[Round]) -> str:
    """An estimate of the time left, as text: from rounds of the same concurrency, else from all."""
    if not rounds:
        return "time left not known yet"
    seconds = 0.0
    for task in tasks:
        alike = [each.seconds for each in rounds if each.concurrency == task.concurrency]
        seconds += statistics.mean(alike or [each.seconds for each in rounds])
    return f"about {seconds / 60:.0f} min left" if seconds >= 60 else f"about {seconds:.0f} s left"
