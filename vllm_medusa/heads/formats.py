"""The five formats of Medusa heads on disk: tensor names and shapes. No file is opened here.

All hold the same thing, K heads of L residual blocks x + SiLU(W x + b), with or without an LM head
of their own at the end (Medusa, arXiv 2401.10774, section 2.1.1). They differ in the names:

    format       from                  block l of head i               LM head of head i
    medusa-v0.1  Medusa v0.1           {i}.{l}.linear.*                {i}.{L}.weight
    medusa-2     "version": "2"        {i}.{l}.linear.*                none: the target's
    medusa-1.0   Medusa v1.0           medusa_head.{i}.{l}.linear.*    medusa_head.{i}.{L}.weight
    modelopt     NVIDIA ModelOpt       medusa_heads.{i}.{l}.linear.*   medusa_heads.{i}.{L}.weight
    vllm         vLLM up to 0.32       blocks.{i}.layers.{l}.*         lm_heads.{i}.weight, or one
                                                                       lm_head.weight for all heads

where * is ``weight`` [hidden, hidden] and perhaps ``bias`` [hidden]. Sequential heads (Hydra,
arXiv 2402.05109), of the first two formats only, also have ``{i}.path.weight``
[hidden, (i + 1) * hidden]: what block 0 of head i makes of the embeddings of the tokens on the path
to its guess, the root's first: x + SiLU(W x + P e + b). Any format may hold vLLM's
``token_map``, and those with ``medusa_head`` in the names may stand inside a target's checkpoint.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

FORMATS = ("medusa-v0.1", "medusa-2", "medusa-1.0", "modelopt", "vllm")
MAX_PROBLEMS_SHOWN = 20


class HeadsError(ValueError):
    """The heads cannot be found, read or used; the message says what is wrong and what to do."""


def raise_problems(what: str, problems: list[str]) -> None:
    """Raise one HeadsError that lists the problems, at most 20 written out; none: return."""
    if not problems:
        return
    lines = [f"\n  - {problem}" for problem in problems[:MAX_PROBLEMS_SHOWN]]
    if len(problems) > MAX_PROBLEMS_SHOWN:
        lines.append(f"\n  and {len(problems) - MAX_PROBLEMS_SHOWN} more")
    raise HeadsError(f"{what}: {len(problems)} problem(s) with the tensors:{''.join(lines)}")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as a file's header describes it. dtype is None where torch has no such type."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    dtype_name: str

    def __str__(self) -> str:
        return f"{self.file.name}: {self.name}"


class Part(NamedTuple):
    """What a tensor is, whatever its format calls it. The layer of an LM head is L."""

    # "block_weight", "block_bias", "path_weight", "lm_head", "shared_lm_head" or "token_map"
    kind: str
    head: int = 0
    layer: int = 0


SHARED_LM_HEAD = Part("shared_lm_head")
TOKEN_MAP = Part("token_map")

# Heads and layers are counted by the largest number seen: three digits keep a stray name from
# announcing a billion missing heads.
_NUMBER = r"(0|[1-9]\d{0,2})"
_INDEXED = re.compile(rf"{_NUMBER}\.{_NUMBER}\.(linear\.weight|linear\.bias|weight)")
_PATH = re.compile(rf"{_NUMBER}\.path\.weight")
_VLLM_BLOCK = re.compile(rf"blocks\.{_NUMBER}\.layers\.{_NUMBER}\.(weight|bias)")
_VLLM_LM_HEAD = re.compile(rf"lm_heads\.{_NUMBER}\.weight")

# The prefix of every tensor of a head. "medusa-v0.1" stands for "medusa-2" as well until it is
# known whether the heads have LM heads: their other names are the same.
_PREFIX = {"medusa-v0.1": "", "medusa-1.0": "medusa_head.", "modelopt": "medusa_heads."}
_IN_TARGET = tuple(prefix for prefix in _PREFIX.values() if prefix)


def _parse_indexed(prefix: str, name: str) -> Part | None:
    if name in ("token_map", prefix + "token_map"):
        return TOKEN_MAP
    if not prefix and (match := _PATH.fullmatch(name)):
        return Part("path_weight", int(match[1]))
    match = _INDEXED.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    if match is None:
        return None
    kinds = {"linear.weight": "block_weight", "linear.bias": "block_bias", "weight": "lm_head"}
    return Part(kinds[match[3]], int(match[1]), int(match[2]))


def _parse_vllm(name: str) -> Part | None:
    if name == "token_map":
        return TOKEN_MAP
    if name == "lm_head.weight":
        return SHARED_LM_HEAD
    if match := _VLLM_BLOCK.fullmatch(name):
        return Part(f"block_{match[3]}", int(match[1]), int(match[2]))
    if match := _VLLM_LM_HEAD.fullmatch(name):
        return Part("lm_head", int(match[1]))
    return None


def parse_name(fmt: str, name: str) -> Part | None:
    """What ``name`` is in the format, or None where the format has no such name."""
    return _parse_vllm(name) if fmt == "vllm" else _parse_indexed(_PREFIX[fmt], name)


def name_of(fmt: str, part: Part) -> str:
    """The name of a part in a format; the inverse of ``parse_name``."""
    if part == TOKEN_MAP:
        return "token_map"
    if part == SHARED_LM_HEAD:
        return "lm_head.weight"
    if part.kind == "path_weight":
        return f"{part.head}.path.weight"
    weight_or_bias = part.kind.removeprefix("block_")
    if fmt == "vllm":
        if part.kind == "lm_head":
            return f"lm_heads.{part.head}.weight"
        return f"blocks.{part.head}.layers.{part.layer}.{weight_or_bias}"
    prefix = f"{_PREFIX[fmt]}{part.head}.{part.layer}"
    return f"{prefix}.weight" if part.kind == "lm_head" else f"{prefix}.linear.{weight_or_bias}"


def drop_target_tensors(names: Iterable[str]) -> tuple[list[str], int]:
    """Keep the names of heads where they stand inside a target's checkpoint.

    Returns:
        The names to look at, and how many were dropped as the target's. Nothing is dropped where
        no name marks heads inside a target: an odd name in a file of heads alone is an error later.
    """
    names = list(names)
    if not any(name.startswith(_IN_TARGET) for name in names):
        return names, 0
    kept = [name for name in names if name.startswith(_IN_TARGET) or name == "token_map"]
    return kept, len(names) - len(kept)


def sniff_format(names: Iterable[str]) -> str | None:
    """The format that most names belong to; None where no name belongs to a head."""
    votes: Counter[str] = Counter()
    for name in names:
        for fmt in (*_PREFIX, "vllm"):
            part = parse_name(fmt, name)
            # Every causal LM has an lm_head.weight: it says nothing about heads.
            if part is not None and part.kind not in ("token_map", "shared_lm_head"):
                votes[fmt] += 1
    return votes.most_common(1)[0][0] if votes else None
