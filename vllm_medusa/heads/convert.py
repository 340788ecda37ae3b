"""Heads from one format to another without loss: what was written is read back and compared."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.calibration.ranks_file import RANKS_FILE
from vllm_medusa.heads.checkpoint import (
    HeadsError,
    HeadsInfo,
    HeadsWeights,
    check_against_target,
    load_heads,
)
from vllm_medusa.heads.files import CONFIG_FILE, read_json
from vllm_medusa.heads.save import save_heads, unfinished_folder
from vllm_medusa.heads.target_lm_head import read_target_lm_head
from vllm_medusa.tree import TREE_FILE

CARRIED = (TREE_FILE, RANKS_FILE, "README.md")


@dataclass(frozen=True)
class Conversion:
    """What was done."""

    source: HeadsInfo
    result: HeadsInfo
    num_tensors: int
    """Tensors of the result, each found to be bit for bit that of the source."""
    carried: tuple[str, ...]
    """Names of the files that were copied along."""
    notes: tuple[str, ...]
    """What the user might not expect."""


def convert_heads(
    heads: str,
    output: Path,
    fmt: str,
    *,
    revision: str | None = None,
    target: str | None = None,
    dtype: torch.dtype | None = None,
) -> Conversion:
    """Write heads in another format.

    Rows of LM heads that token_map leaves out stay. An LM head that serves all heads becomes a copy
    per head in formats other than "vllm".

    Args:
        heads: A folder, or a hub id with or without ``@revision``.
        output: A folder that is new or empty.
        fmt: One of ``FORMATS``.
        revision: Revision of the heads on the hub.
        target: Folder or hub id of the target, where its LM head is needed: heads without LM heads
            of their own get it in formats that want some; in "medusa-2", LM heads that equal it are
            left out.
        dtype: Type of the weights; None keeps the stored one.

    Raises:
        HeadsError: The heads or the target cannot be read, the format cannot hold the heads without
            loss, or ``output`` cannot be written; nothing is left there then.
    """
    what = f'medusa heads "{heads}"'
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise HeadsError(f'"{output}" is there already, and not an empty folder: give a new one')
    source = load_heads(heads, revision, all_rows=True)
    target_lm_head = None
    if target is not None:
        target_lm_head = read_target_lm_head(target)
        vocab_size, hidden = target_lm_head.shape
        check_against_target(source.info, hidden_size=hidden, vocab_size=vocab_size, target=target)
    lm_head, notes = _settle_lm_head(what, source, fmt, target_lm_head)
    expected, rounded = _to_dtype(what, replace(source, lm_head=lm_head), dtype)
    notes += rounded

    config = _config(what, source.info.path / CONFIG_FILE)
    if target_lm_head is not None:
        config["vocab_size"] = len(target_lm_head)
    carried = tuple(name for name in CARRIED if (source.info.path / name).is_file())
    try:
        with unfinished_folder(output) as unfinished:
            save_heads(
                unfinished,
                fmt,
                block_weight=expected.block_weight,
                block_bias=expected.block_bias,
                path_weight=expected.path_weight,
                lm_head=expected.lm_head,
                token_map=expected.token_map,
                logit_scale=source.info.logit_scale,
                base_model=source.info.base_model,
                config=config,
            )
            written = load_heads(unfinished, all_rows=True)
            num_tensors = _compare(what, expected, written, fmt)
            for name in carried:
                shutil.copyfile(source.info.path / name, unfinished / name)
    except OSError as error:
        raise HeadsError(f'"{output}" cannot be written ({error})') from error
    result = replace(written.info, path=output, source=str(output))
    return Conversion(source.info, result, num_tensors, carried, tuple(notes))


def _settle_lm_head(
    what: str, source: HeadsWeights, fmt: str, target: torch.Tensor | None
) -> tuple[torch.Tensor | None, list[str]]:
    """The LM heads to write, and what to say about them."""
    own = source.lm_head
    if own is None and fmt != "medusa-2":
        if target is None:
            raise HeadsError(
                f"{what}: they use the target's LM head, and heads of format {fmt} have LM heads "
                "of their own. Give the target with --lm-head MODEL: its LM head is written."
            )
        return target[None], ["the target's LM head was written into the heads"]
    if own is not None and fmt == "medusa-2":
        if target is None:
            raise HeadsError(
                f"{what}: they have LM heads of their own, and heads of format medusa-2 have none. "
                "If all are the target's, give it with --lm-head MODEL: they are left out."
            )
        # As many rows as token ids: they are those of the ids, else those of all tokens.
        of_ids = source.token_map is not None and own.shape[1] == len(source.token_map)
        rows = target[source.token_map] if of_ids else target
        common = torch.promote_types(own.dtype, rows.dtype)
        for head, weight in enumerate(own):
            if not _same_bits(weight.to(common), rows.to(common)):
                raise HeadsError(
                    f"{what}: the LM head of head {head} is not the target's, so format medusa-2, "
                    "which has none, cannot hold these heads"
                )
        return None, ["the LM heads, all equal to the target's, were left out"]
    if target is not None:
        return own, ["--lm-head told no more than the size of the vocabulary"]
    return own, []


def _to_dtype(
    what: str, weights: HeadsWeights, dtype: torch.dtype | None
) -> tuple[HeadsWeights, list[str]]:
    """All weights in one type, by default one that holds them exactly, and what to say about it."""
    exact = stored = weights.info.dtype
    if weights.lm_head is not None:
        exact = torch.promote_types(stored, weights.lm_head.dtype)
    dtype = dtype or exact

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        converted = tensor.to(dtype)
        if not converted.isfinite().all():
            raise HeadsError(f"{what}: some values are too large for {dtype}")
        return converted

    notes = []
    if torch.promote_types(exact, dtype) != dtype:
        notes.append(f"rounded from {_name(exact)} to {_name(dtype)}")
    elif dtype != stored:
        notes.append(f"widened from {_name(stored)} to {_name(dtype)}")
    bias, path, lm_head = weights.block_bias, weights.path_weight, weights.lm_head
    converted = replace(
        weights,
        block_weight=convert(weights.block_weight),
        block_bias=None if bias is None else convert(bias),
        path_weight=None if path is None else [convert(weight) for weight in path],
        lm_head=None if lm_head is None else convert(lm_head),
    )
    return converted, notes


def _config(what: str, file: Path) -> dict[str, Any]:
    """What the config says beside the heads' own keys; of a target's, the vocabulary only."""
    config = read_json(what, file) if file.is_file() else {}
    if config.get("model_type") in (None, "medusa"):
        return config
    return {key: value for key, value in config.items() if key == "vocab_size"}


def _compare(what: str, expected: HeadsWeights, written: HeadsWeights, fmt: str) -> int:
    """Check that everything is the same bit for bit; returns how many tensors were compared.

    Raises:
        HeadsError: Names what differs.
    """
    wanted, found = dict(_tensors(expected)), dict(_tensors(written))
    wrong = sorted(wanted.keys() ^ found.keys())
    wrong += [
        name for name in wanted if name in found and not _same_bits(wanted[name], found[name])
    ]
    for name in ("logit_scale", "base_model"):
        if getattr(expected.info, name) != getattr(written.info, name):
            wrong.append(name)
    if written.info.format != fmt:
        wrong.append(f"format {written.info.format}")
    wrong += written.info.warnings
    if wrong:
        raise HeadsError(
            f"{what}: written heads were read back and differ, a bug of vllm-medusa: "
            f"{', '.join(wrong)}"
        )
    return len(found)


def _tensors(weights: HeadsWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor of each head, a shared LM head once per head."""
    for head in range(weights.info.num_heads):
        for layer in range(weights.info.num_layers):
            yield f"weight {layer} of head {head}", weights.block_weight[head, layer]
            if weights.block_bias is not None:
                yield f"bias {layer} of head {head}", weights.block_bias[head, layer]
        if weights.path_weight is not None:
            yield f"path weight of head {head}", weights.path_weight[head]
        if weights.lm_head is not None:
            yield f"LM head of head {head}", weights.lm_head[head % len(weights.lm_head)]
    if weights.token_map is not None:
        yield "token_map", weights.token_map


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same type, same shape, same bits: unlike ``torch.equal`` alone, 0 and -0 differ."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
