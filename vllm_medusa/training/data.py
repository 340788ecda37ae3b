"""Training data: conversations from a JSONL file, in any of three shapes.

{"messages": [{"role": "user", "content": "..."}, ...]}          OpenAI
{"conversations": [{"from": "human", "value": "..."}, ...]}      ShareGPT
{"prompt": "..."}                                                a user message alone
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "system": "system",
}
SHAPES = '"messages", "conversations" or "prompt"'

Message = dict[str, str]


class DataError(ValueError):
    """The data cannot be used; the message names the file, the line and what to do."""


@dataclass(frozen=True)
class Conversation:
    """One line of the data.

    Attributes:
        line: its number in the file, from 1 on.
        messages: ``role`` and ``content`` of each, as chat templates take them.
    """

    line: int
    messages: list[Message]

    def turns(self) -> Iterator[tuple[list[Message], str | None]]:
        """What stands before each answer, and the answer of the data where it has one.

        A user message with nothing behind it is a turn without an answer.
        """
        for end, message in enumerate(self.messages):
            if message["role"] != "user":
                continue
            following = self.messages[end + 1 : end + 2]
            answer = following[0] if following and following[0]["role"] == "assistant" else None
            yield self.messages[: end + 1], answer["content"] if answer else None


def read_conversations(path: Path, max_bad_lines: int = 10) -> tuple[list[Conversation], list[str]]:
    """All conversations of a JSONL file.

    Args:
        path: the file.
        max_bad_lines: so many malformed lines are skipped, one more is an error.

    Returns:
        The conversations, and one line of text for each malformed line.

    Raises:
        DataError: the file cannot be read, holds no conversation, or too many malformed lines.
    """
    conversations: list[Conversation] = []
    problems: list[str] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    conversations.append(Conversation(number, _messages(json.loads(line))))
                except (ValueError, TypeError) as error:
                    problems.append(f"{path}, line {number}: {error}")
                    if len(problems) > max_bad_lines:
                        shown = "\n  ".join(problems)
                        raise DataError(
                            f"more than {max_bad_lines} malformed lines (--max-bad-lines):\n"
                            f"  {shown}\nEach line must be a JSON object with {SHAPES}."
                        ) from None
    except OSError as error:
        raise DataError(f"cannot read the data {path}: {error.strerror}") from error
    if not conversations:
        raise DataError(
            f"{path} holds no conversations: each line must be a JSON object with {SHAPES}"
        )
    return conversations, problems


def _messages(entry: Any) -> list[Message]:
    """The messages of one line, checked."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, found {type(entry).__name__}")
    if "messages" in entry:
        items, role_key, text_key = entry["messages"], "role", "content"
    elif "conversations" in entry:
        items, role_key, text_key = entry["conversations"], "from", "value"
    elif "prompt" in entry:
        items, role_key, text_key = (
            [{"role": "user", "content": entry["prompt"]}],
            "role",
            "content",
        )
    else:
        raise ValueError(f"expected a key {SHAPES}, found {', '.join(sorted(entry)) or 'none'}")
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError("the messages are not a list of objects")
    messages = []
    for item in items:
        role, text = item.get(role_key), item.get(text_key)
        if role not in ROLES:
            raise ValueError(f"{role_key} is {role!r}, expected one of {', '.join(sorted(ROLES))}")
        if not isinstance(text, str):
            raise ValueError(f"{text_key} of a {role} message is no text: {type(text).__name__}")
        messages.append({"role": ROLES[role], "content": text})
    # Cut in the middle of a conversation, as datasets often are: an answer without its question.
    while messages and messages[0]["role"] == "assistant":
        messages.pop(0)
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise ValueError("no user message with text")
    return messages
