"""Write Medusa heads in any of the five formats that ``formats.py`` describes."""

import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vllm_medusa.heads.files import CONFIG_FILE, HEADS_FILE
from vllm_medusa.heads.formats import (
    FORMATS,
    SHARED_LM_HEAD,
    TOKEN_MAP,
    HeadsError,
    Part,
    name_of,
    raise_problems,
)
from vllm_medusa.heads.layout import FLOAT_DTYPES

# What some format says about its tensors: never taken over from another config.
_OWN_KEYS = {
    "architectures",
    "base_model_name_or_path",
    "dtype",
    "head_type",
    "hidden_size",
    "logit_scale",
    "medusa",
    "medusa_fc_bias",
    "medusa_num_heads",
    "medusa_num_layers",
    "model_type",
    "num_heads",
    "num_hidden_layers",
    "original_lm_head",
    "torch_dtype",
    "truncated_vocab_size",
    "version",
    "vocab_size",
}


def save_heads(
    folder: Path,
    fmt: str,
    *,
    block_weight: torch.Tensor,
    block_bias: torch.Tensor | None = None,
    path_weight: list[torch.Tensor] | None = None,
    lm_head: torch.Tensor | None = None,
    token_map: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    base_model: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write ``medusa_lm_head.safetensors`` and ``config.json``, which ``load_heads`` reads back.

    A new folder appears when both are complete. In one that is there each file is replaced whole,
    and other files stay.

    Args:
        folder: Where to; made where it is missing.
        fmt: One of ``FORMATS``.
        block_weight: [K, L, hidden, hidden], as in ``HeadsWeights``; all weights of one float type.
        block_bias: [K, L, hidden].
        path_weight: Of sequential heads, of head k = 1..K [hidden, k * hidden].
        lm_head: [K, V, hidden], or [1, V, hidden] for one that serves all heads, of which formats
            other than "vllm" get a copy per head. V is the target's vocabulary or, with a
            token_map, perhaps that of the drafts.
        token_map: Integers [draft vocabulary].
        logit_scale: Above 0.
        base_model: The target's name.
        config: More to write into config.json, e.g. how the heads were trained. What is counted
            from the weights is left out. ``vocab_size``, the target's, is needed in the format
            "vllm" where lm_head holds only the rows of token_map.

    Raises:
        HeadsError: The format cannot hold such heads (says why, and which can); wrong shapes or
            types; or the files cannot be written, in which case nothing is left of them.
    """
    what = f'medusa heads "{folder}"'
    if fmt not in FORMATS:
        raise HeadsError(f"{what}: unknown format {fmt!r}, known are {', '.join(FORMATS)}")
    num_heads, num_layers, hidden = _check(
        what, block_weight, block_bias, path_weight, lm_head, token_map
    )
    if not 0 < logit_scale < math.inf:
        raise HeadsError(f"{what}: logit_scale must be above 0, found {logit_scale}")
    reasons = {
        each: _why_not(each, path_weight is not None, lm_head is not None, num_layers)
        for each in FORMATS
    }
    if reasons[fmt]:
        can = ", ".join(each for each in FORMATS if not reasons[each]) or "none"
        raise HeadsError(
            f"{what}: format {fmt} cannot hold these heads: {reasons[fmt]}. Formats that can: {can}"
        )

    own = _config(fmt, num_heads, num_layers, block_bias is not None, lm_head, token_map)
    own |= {"hidden_size": hidden}
    vocab_size = _vocab_size(lm_head, token_map, config or {})
    if vocab_size is not None:
        own["vocab_size"] = vocab_size
    if base_model is not None:
        own["base_model_name_or_path"] = base_model
    if path_weight is not None:
        own["head_type"] = "sequential"
    if logit_scale != 1 or fmt == "vllm":
        own["logit_scale"] = logit_scale
    if fmt == "vllm" and vocab_size is None:
        raise HeadsError(
            f'{what}: config.json of format vllm needs "vocab_size", the tokens of the target, and '
            "LM heads of the rows of token_map alone do not tell"
        )
    more = {key: value for key, value in (config or {}).items() if key not in _OWN_KEYS}
    parts = _parts(fmt, block_weight, block_bias, path_weight, lm_head, token_map)
    # Heads with LM heads and without have the same names in Medusa's own formats.
    names = "medusa-v0.1" if fmt == "medusa-2" else fmt
    tensors = {
        name_of(names, part): tensor.detach().cpu().contiguous() for part, tensor in parts.items()
    }
    try:
        with unfinished_folder(folder) as unfinished:
            save_file(tensors, unfinished / f"{HEADS_FILE}.safetensors", {"format": "pt"})
            text = json.dumps(own | more, indent=2) + "\n"
            (unfinished / CONFIG_FILE).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise HeadsError(f"{what}: cannot be written ({error})") from error


@contextmanager
def unfinished_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into: at the end its files are in ``folder``, after an error nowhere.

    A new ``folder`` appears at once. In one that is there already, perhaps the mount point of
    another disk, files are replaced one by one.

    Raises:
        OSError: The files cannot be written.
    """
    there = folder.is_dir()
    if not there:
        folder.parent.mkdir(parents=True, exist_ok=True)
    place = folder if there else folder.parent
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=place) as temporary:
        # A folder of its own in it: the temporary one is closed to other users.
        unfinished = Path(temporary) / "heads"
        unfinished.mkdir()
        yield unfinished
        if there:
            for file in unfinished.iterdir():
                os.replace(file, folder / file.name)
        else:
            os.rename(unfinished, folder)


def _why_not(fmt: str, sequential: bool, own_lm_heads: bool, num_layers: int) -> str | None:
    """Why a format cannot hold such heads; None where it can."""
    if sequential and fmt not in ("medusa-v0.1", "medusa-2"):
        return "they are sequential, and it has no name for what they read of the path"
    if fmt == "medusa-2" and own_lm_heads:
        return "they have LM heads of their own, and in this format the target's is used"
    if fmt == "medusa-2" and not num_layers:
        return "they have no layers, and LM heads are not stored in this format"
    if fmt != "medusa-2" and not own_lm_heads:
        return "they use the target's LM head, and in this format heads have LM heads of their own"
    return None


def _is_shared(fmt: str, num_heads: int, num_layers: int, lm_head: torch.Tensor | None) -> bool:
    """Whether one stored LM head serves all heads."""
    # Without layers, the number of heads is that of the LM heads.
    return fmt == "vllm" and lm_head is not None and len(lm_head) < num_heads and num_layers > 0


def _config(
    fmt: str,
    num_heads: int,
    num_layers: int,
    has_bias: bool,
    lm_head: torch.Tensor | None,
    token_map: torch.Tensor | None,
) -> dict[str, Any]:
    """The keys of config.json that only some formats have."""
    if fmt == "modelopt":
        return {"medusa": {"num_medusa_heads": num_heads, "num_medusa_layers": num_layers}}
    if fmt != "vllm":
        counts = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
        return counts | ({"version": "2"} if fmt == "medusa-2" else {})
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": has_bias,
        "original_lm_head": _is_shared(fmt, num_heads, num_layers, lm_head),
    }
    return config if token_map is None else config | {"truncated_vocab_size": len(token_map)}


def _parts(
    fmt: str,
    block_weight: torch.Tensor,
    block_bias: torch.Tensor | None,
    path_weight: list[torch.Tensor] | None,
    lm_head: torch.Tensor | None,
    token_map: torch.Tensor | None,
) -> dict[Part, torch.Tensor]:
    """Every tensor to store."""
    # Contiguous: safetensors stores no memory twice, as that of a tensor expanded over the heads.
    parts: dict[Part, torch.Tensor] = {}
    num_heads, num_layers = block_weight.shape[:2]
    block_weight = block_weight.contiguous()
    if block_bias is not None:
        block_bias = block_bias.contiguous()
    for head in range(num_heads):
        for layer in range(num_layers):
            parts[Part("block_weight", head, layer)] = block_weight[head, layer]
            if block_bias is not None:
                parts[Part("block_bias", head, layer)] = block_bias[head, layer]
        if path_weight is not None:
            parts[Part("path_weight", head)] = path_weight[head]
    if token_map is not None:
        parts[TOKEN_MAP] = token_map.to(torch.int64)
    if lm_head is None:
        return parts
    if _is_shared(fmt, num_heads, num_layers, lm_head):
        return parts | {SHARED_LM_HEAD: lm_head[0]}
    lm_head = lm_head.expand(num_heads, -1, -1).contiguous()
    for head in range(num_heads):
        parts[Part("lm_head", head, num_layers)] = lm_head[head]
    return parts


def _check(
    what: str,
    block_weight: torch.Tensor,
    block_bias: torch.Tensor | None,
    path_weight: list[torch.Tensor] | None,
    lm_head: torch.Tensor | None,
    token_map: torch.Tensor | None,
) -> tuple[int, int, int]:
    """Number of heads, number of layers and hidden size; HeadsError where the weights disagree."""
    problems: list[str] = []
    if block_weight.ndim != 4 or not block_weight.shape[0]:
        found = list(block_weight.shape)
        raise HeadsError(f"{what}: block_weight: expected [K, L, hidden, hidden], found {found}")
    num_heads, num_layers, hidden = block_weight.shape[:3]
    expected: dict[str, tuple[torch.Tensor, tuple[int, ...]]] = {}
    expected["block_weight"] = (block_weight, (num_heads, num_layers, hidden, hidden))
    if block_bias is not None:
        expected["block_bias"] = (block_bias, (num_heads, num_layers, hidden))
    if path_weight is not None:
        if len(path_weight) != num_heads or not num_layers:
            problems.append(
                f"path_weight: {len(path_weight)} for {num_heads} heads of {num_layers} layers; "
                "expected one per head, and a layer that reads it"
            )
        for number, weight in enumerate(path_weight, start=1):
            expected[f"path_weight of head {number}"] = (weight, (hidden, number * hidden))
    if lm_head is not None:
        num_stored = 1 if lm_head.shape[:1] == (1,) else num_heads
        expected["lm_head"] = (lm_head, (num_stored, *lm_head.shape[1:2], hidden))
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            problems.append(f"{name}: expected shape {list(shape)}, found {list(tensor.shape)}")
    dtypes = {tensor.dtype for tensor, _ in expected.values()}
    if len(dtypes) > 1 or not dtypes <= set(FLOAT_DTYPES):
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        problems.append(
            f"expected weights of one type, float16, bfloat16, float32 or float64, found {names}"
        )
    if token_map is not None:
        num_rows = lm_head.shape[1] if lm_head is not None and lm_head.ndim == 3 else sys.maxsize
        wrong_kind = token_map.ndim != 1 or token_map.is_floating_point()
        if wrong_kind or not 0 < len(token_map) <= num_rows:
            problems.append(
                "token_map: expected integers in one dimension, no more than LM heads have rows, "
                f"found {token_map.dtype} {list(token_map.shape)}"
            )
    raise_problems(what, problems)
    return num_heads, num_layers, hidden


def _vocab_size(
    lm_head: torch.Tensor | None, token_map: torch.Tensor | None, config: Mapping[str, Any]
) -> int | None:
    """Tokens of the target, where the LM heads or the config tell."""
    if lm_head is not None and (token_map is None or lm_head.shape[1] > len(token_map)):
        return lm_head.shape[1]
    vocab_size = config.get("vocab_size")
    least = 0 if token_map is None else int(token_map.max())
    return vocab_size if type(vocab_size) is int and vocab_size > least else None
