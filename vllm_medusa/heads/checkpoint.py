"""Medusa heads from a folder or the hub: what they are, whether they fit, and their weights.

``inspect_heads`` reads headers only and is what the configuration uses; ``load_heads`` reads the
weights. What the files may hold is described in ``formats.py``.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.heads.files import (
    CONFIG_FILE,
    TensorReader,
    find_files,
    read_json,
    resolve_heads,
)
from vllm_medusa.heads.formats import (
    TOKEN_MAP,
    HeadsError,
    Part,
    StoredTensor,
    raise_problems,
)
from vllm_medusa.heads.layout import Layout, build_layout, config_warnings

__all__ = [
    "HeadsError",
    "HeadsInfo",
    "HeadsWeights",
    "check_against_target",
    "inspect_heads",
    "load_heads",
    "non_finite_tensors",
    "resolve_heads",
]

# Values looked at at once when looking for NaN: bounds the memory this takes.
_CHUNK = 1 << 24


@dataclass(frozen=True)
class HeadsInfo:
    """What a checkpoint of heads holds."""

    path: Path
    """The folder."""
    source: str
    """The heads as the user wrote them."""
    format: str
    """"medusa-v0.1", "medusa-2", "medusa-1.0", "vllm" or "modelopt"."""
    num_heads: int
    num_layers: int
    """Residual blocks per head; 0 is allowed."""
    hidden_size: int
    vocab_size: int | None
    """Rows of the LM heads as stored; None where the heads use the target's LM head."""
    draft_vocab_size: int | None
    """Length of token_map; None without one."""
    has_bias: bool
    is_sequential: bool
    """Heads also read the tokens on the path to their guess (``path_weight``)."""
    own_lm_heads: bool
    """The checkpoint holds LM heads: one per head, or one for all (``shared_lm_head``)."""
    shared_lm_head: bool
    """One stored LM head serves all heads (vLLM's original_lm_head)."""
    logit_scale: float
    dtype: torch.dtype
    num_parameters: int
    """Values in the blocks and the LM heads as stored, without token_map."""
    base_model: str | None
    """base_model_name_or_path of the config."""
    files: tuple[str, ...]
    """Names of the files that hold the heads."""
    warnings: tuple[str, ...]
    """What is odd, but does not keep the heads from being used."""
    max_token_id: int | None = None
    """The largest id in token_map; None without one."""


@dataclass
class HeadsWeights:
    """Weights of K heads with L residual blocks each, on the CPU.

    V is the draft vocabulary: the length of ``token_map`` where there is one, else the rows of the
    LM heads.
    """

    info: HeadsInfo
    block_weight: torch.Tensor
    """[K, L, hidden, hidden], (out, in) as in torch.nn.Linear."""
    block_bias: torch.Tensor | None
    """[K, L, hidden]; None where the blocks have no bias."""
    path_weight: list[torch.Tensor] | None
    """Of head k = 1..K [hidden, k * hidden], for the embeddings of the root and of the k - 1 nodes
    behind it, in this order; None for plain heads."""
    lm_head: torch.Tensor | None
    """[K, V, hidden], [1, V, hidden] where one serves all heads, None where the target's does.
    With ``lm_head_rows`` given to ``load_heads``, only these rows of V; with ``all_rows`` the rows
    as stored."""
    token_map: torch.Tensor | None
    """int64 [V], draft index to target token id; always whole. None where they are the same."""


def inspect_heads(heads: str | Path, revision: str | None = None) -> HeadsInfo:
    """What the heads are, from the headers of their files; of the weights only token_map is read.

    Args:
        heads: A folder, or a hub id with or without ``@revision``.
        revision: Revision on the hub.

    Raises:
        HeadsError: Not found, unreadable, or with missing, extra, mis-shaped or mis-typed tensors,
            each of which is named.
    """
    with _open(heads, revision) as checkpoint:
        return checkpoint.info


def check_against_target(
    info: HeadsInfo, *, hidden_size: int, vocab_size: int, target: str
) -> None:
    """Refuse heads that cannot belong to the target.

    Args:
        info: The heads.
        hidden_size: Hidden size of the target.
        vocab_size: Vocabulary of the target, rows of its LM head without padding.
        target: Name of the target, for messages.

    Raises:
        HeadsError: Names both models and both numbers.
    """
    what = f'medusa heads "{info.source}" do not fit target "{target}"'
    made_for = f' They were made for "{info.base_model}".' if info.base_model else ""
    if info.hidden_size != hidden_size:
        raise HeadsError(
            f"{what}: hidden size {info.hidden_size} in the heads, {hidden_size} in the target."
            f"{made_for}"
        )
    if info.draft_vocab_size is not None and info.draft_vocab_size > vocab_size:
        raise HeadsError(
            f"{what}: token_map holds {info.draft_vocab_size} token ids, the target's vocabulary "
            f"{vocab_size}.{made_for}"
        )
    if info.max_token_id is not None and info.max_token_id >= vocab_size:
        raise HeadsError(
            f"{what}: token_map holds token id {info.max_token_id}, the target's vocabulary ends "
            f"at {vocab_size - 1}.{made_for}"
        )
    truncated = info.draft_vocab_size is not None and info.vocab_size == info.draft_vocab_size
    if info.vocab_size is not None and info.vocab_size != vocab_size and not truncated:
        raise HeadsError(
            f"{what}: the LM heads have a vocabulary of {info.vocab_size}, the target one of "
            f"{vocab_size}.{made_for}"
        )


def load_heads(
    heads: str | Path,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    lm_head_rows: slice | None = None,
    all_rows: bool = False,
) -> HeadsWeights:
    """Read the weights of the heads.

    Args:
        heads: A folder, or a hub id with or without ``@revision``.
        revision: Revision on the hub.
        dtype: Type of the weights; None keeps the stored one.
        lm_head_rows: Rows of the draft vocabulary to read of each LM head, e.g. those of one
            tensor-parallel rank; the rest is not read. None reads all. No steps.
        all_rows: Read the LM heads as stored, also rows that token_map leaves out.

    Raises:
        HeadsError: As ``inspect_heads``; also for values that are NaN or infinite, or become so in
            ``dtype``, naming each tensor and how many.
    """
    with _open(heads, revision) as checkpoint:
        info, layout = checkpoint.info, checkpoint.layout
        dtype = dtype or info.dtype
        block_shape = (info.num_heads, info.num_layers, info.hidden_size)
        block_weight = torch.empty(*block_shape, info.hidden_size, dtype=dtype)
        block_bias = torch.empty(block_shape, dtype=dtype) if info.has_bias else None
        num_tokens = (not all_rows and info.draft_vocab_size) or info.vocab_size or 0
        rows = _rows(lm_head_rows, num_tokens)
        path_weight = None
        if info.is_sequential:
            hidden = info.hidden_size
            path_weight = [
                torch.empty(hidden, number * hidden, dtype=dtype)
                for number in range(1, info.num_heads + 1)
            ]
        lm_head = None
        if info.own_lm_heads:
            num_rows = rows.stop - rows.start
            shape = (len(layout.lm_head_parts), num_rows, info.hidden_size)
            lm_head = torch.empty(shape, dtype=dtype)

        problems: list[str] = []
        for part in layout.expected_shapes:
            if part.kind == "block_weight":
                target = block_weight[part.head, part.layer]
            elif part.kind == "block_bias":
                assert block_bias is not None
                target = block_bias[part.head, part.layer]
            elif part.kind == "path_weight":
                assert path_weight is not None
                target = path_weight[part.head]
            else:
                assert lm_head is not None
                target = lm_head[part.head]
            source = checkpoint.read(part, rows, all_rows)
            target.copy_(source)
            problems += _check_finite(layout.parts[part], source, target)
        raise_problems(_what(heads), problems)
        return HeadsWeights(
            info, block_weight, block_bias, path_weight, lm_head, checkpoint.token_map
        )


def non_finite_tensors(heads: str | Path, revision: str | None = None) -> list[str]:
    """One line per tensor in use that holds NaN or infinity, with how many; reads all weights.

    Raises:
        HeadsError: As ``inspect_heads``.
    """
    with _open(heads, revision) as checkpoint:
        lines: list[str] = []
        for part in checkpoint.layout.expected_shapes:
            tensor = checkpoint.read(part, slice(None))
            lines += _check_finite(checkpoint.layout.parts[part], tensor, tensor)
        return lines


@dataclass
class _Checkpoint:
    """An open checkpoint whose headers are sound."""

    info: HeadsInfo
    layout: Layout
    reader: TensorReader
    token_map: torch.Tensor | None

    def read(self, part: Part, rows: slice, all_rows: bool = False) -> torch.Tensor:
        """A part; of an LM head only these rows of the draft vocabulary, or of all stored ones."""
        stored = self.layout.parts[part]
        if not part.kind.endswith("lm_head"):
            return self.reader.read(stored)
        if self.token_map is not None and stored.shape[0] > len(self.token_map) and not all_rows:
            # Stored for the whole vocabulary: only the selected rows of the mapped file are read.
            return self.reader.read(stored)[self.token_map[rows]]
        return self.reader.read(stored, rows)


@contextmanager
def _open(heads: str | Path, revision: str | None) -> Iterator[_Checkpoint]:
    what = _what(heads)
    folder = resolve_heads(str(heads), revision)
    config_file = folder / CONFIG_FILE
    config = read_json(what, config_file) if config_file.is_file() else {}
    files = find_files(what, folder)
    with TensorReader(what, files) as reader, torch.no_grad():
        layout = build_layout(what, reader.tensors, files.paths, config)
        token_map = _read_token_map(what, layout, reader)
        warnings = list(layout.warnings)
        if not config_file.is_file():
            warnings.append(f"no {CONFIG_FILE}: all is taken from the tensors, logit_scale is 1")
        else:
            warnings += config_warnings(what, config, layout)
        if reader.num_target_tensors:
            warnings.append(
                f"the files also hold {reader.num_target_tensors} tensors of a target: they are "
                "not read. Heads trained together with a target fit that target best"
            )
        base_model = config.get("base_model_name_or_path")
        info = HeadsInfo(
            path=folder,
            source=str(heads),
            format=layout.format,
            num_heads=layout.num_heads,
            num_layers=layout.num_layers,
            hidden_size=layout.hidden_size,
            vocab_size=layout.lm_head_rows,
            draft_vocab_size=None if token_map is None else len(token_map),
            has_bias=layout.has_bias,
            is_sequential=layout.is_sequential,
            own_lm_heads=layout.lm_head_rows is not None,
            shared_lm_head=layout.shared_lm_head,
            logit_scale=_logit_scale(what, config),
            dtype=layout.dtype,
            num_parameters=sum(math.prod(shape) for shape in layout.expected_shapes.values()),
            base_model=base_model if isinstance(base_model, str) else None,
            files=tuple(sorted({tensor.file.name for tensor in layout.parts.values()})),
            warnings=tuple(warnings),
            max_token_id=None if token_map is None else int(token_map.max()),
        )
        yield _Checkpoint(info, layout, reader, token_map)


def _what(heads: str | Path) -> str:
    return f'medusa heads "{heads}"'


def _rows(rows: slice | None, num_rows: int) -> slice:
    start, stop, step = (rows or slice(None)).indices(num_rows)
    if step != 1:
        raise ValueError(f"lm_head_rows must be consecutive rows, found step {step}")
    return slice(start, max(start, stop))


def _read_token_map(what: str, layout: Layout, reader: TensorReader) -> torch.Tensor | None:
    """token_map as int64, each id once and none negative or without a row to select."""
    stored = layout.parts.get(TOKEN_MAP)
    if stored is None:
        return None
    token_map = reader.read(stored).to(torch.int64, copy=True)
    problems = []
    if int(token_map.min()) < 0:
        count, least = int((token_map < 0).sum()), int(token_map.min())
        problems.append(f"{stored}: {count} negative token id(s), the least {least}")
    ids, counts = token_map.unique(return_counts=True)
    if len(ids) < len(token_map):
        twice = ids[counts > 1].tolist()
        shown = ", ".join(str(token) for token in twice[:5]) + (", ..." if len(twice) > 5 else "")
        problems.append(
            f"{stored}: {len(token_map)} token ids, only {len(ids)} different; repeated: {shown}"
        )
    rows = layout.lm_head_rows
    if rows is not None and rows > len(token_map) and int(token_map.max()) >= rows:
        problems.append(
            f"{stored}: token id {int(token_map.max())}, but the LM heads have {rows} rows"
        )
    raise_problems(what, problems)
    return token_map


def _logit_scale(what: str, config: Mapping[str, Any]) -> float:
    scale = config.get("logit_scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise HeadsError(f"{what}: {CONFIG_FILE}: logit_scale must be above 0, found {scale!r}")
    return float(scale)


def _check_finite(stored: StoredTensor, source: torch.Tensor, copy: torch.Tensor) -> list[str]:
    """A line if the copy, perhaps of a narrower type than the source, is not finite throughout."""
    if not (bad := _count_non_finite(copy)):
        return []
    if in_source := _count_non_finite(source):
        return [f"{stored}: {in_source} of {source.numel()} values are NaN or infinite"]
    return [f"{stored}: {bad} of {source.numel()} values are too large for {copy.dtype}"]


def _count_non_finite(tensor: torch.Tensor) -> int:
    return sum(int((~chunk.isfinite()).sum()) for chunk in tensor.reshape(-1).split(_CHUNK))
