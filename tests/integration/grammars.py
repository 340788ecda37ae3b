"""Random JSON schemas and regular expressions, and whether a text fits them."""

import json
import random
import re
from typing import Any

import jsonschema

Spec = dict[str, Any]
"""Arguments of ``StructuredOutputsParams``: one of them."""


def random_spec(numbers: random.Random) -> Spec:
    """A JSON schema or a regular expression; most texts that fit it are short."""
    if numbers.random() < 0.5:
        return {"json": random_object(numbers, depth=2)}
    return {"regex": random_regex(numbers, depth=2)}


def fits(spec: Spec, text: str) -> bool:
    """Whether a finished text is what was asked for."""
    if "regex" in spec:
        return re.fullmatch(spec["regex"], text) is not None
    if "choice" in spec:
        return text in spec["choice"]
    try:
        # Not strict: xgrammar lets control characters stand in strings.
        jsonschema.validate(json.loads(text, strict=False), spec["json"])
    except (json.JSONDecodeError, jsonschema.ValidationError):
        return False
    return True


def random_object(numbers: random.Random, depth: int) -> dict[str, Any]:
    names = numbers.sample(["a", "ab", "name", "n", "x1", "total", "ok"], numbers.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(numbers, depth - 1) for name in names},
        "required": [name for name in names if numbers.random() < 0.8],
        "additionalProperties": False,
    }


def random_schema(numbers: random.Random, depth: int) -> dict[str, Any]:
    low = numbers.randint(-50, 100)
    kinds: list[Any] = [
        lambda: {"type": "string", "maxLength": numbers.randint(0, 6)},
        lambda: {"type": "string", "pattern": f"^{random_regex(numbers, 1)}$"},
        lambda: {"type": "integer", "minimum": low, "maximum": low + numbers.randint(0, 2000)},
        lambda: {"type": "boolean"},
        lambda: {"enum": numbers.sample(["a", "abba", "b c", 7, 10, True, None], 3)},
        lambda: {"const": numbers.choice(["ab", 12, False])},
    ]
    if depth > 0:
        kinds += [
            lambda: random_object(numbers, depth),
            lambda: {
                "type": "array",
                "items": random_schema(numbers, depth - 1),
                "minItems": numbers.randint(0, 2),
                "maxItems": numbers.randint(2, 4),
            },
            lambda: {"anyOf": [random_schema(numbers, depth - 1) for _ in range(2)]},
        ]
    return numbers.choice(kinds)()


def random_regex(numbers: random.Random, depth: int) -> str:
    return "".join(random_piece(numbers, depth) for _ in range(numbers.randint(1, 4)))


def random_piece(numbers: random.Random, depth: int) -> str:
    if depth > 0 and numbers.random() < 0.4:
        ways = [random_regex(numbers, depth - 1) for _ in range(numbers.randint(1, 3))]
        piece = f"({'|'.join(ways)})"
    else:
        piece = numbers.choice(["[a-c]", "[0-9]", "[A-Za-z]", "[#-&z]", "x", "(ab)", "-", "1"])
    return piece + numbers.choice(["", "", "", "?", "{1,3}", "{2}", "{0,4}", "+"])
