"""What a checkpoint's tensors add up to: counts, shapes and everything that is wrong with them.

Works on headers alone. Heads, layers and sizes are counted from the tensors, never taken from
config.json, which is often wrong.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_medusa.heads.formats import (
    SHARED_LM_HEAD,
    TOKEN_MAP,
    HeadsError,
    Part,
    StoredTensor,
    name_of,
    parse_name,
    raise_problems,
    sniff_format,
)

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INT_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
# How quantised checkpoints name what belongs to a quantised weight.
_QUANTISED = re.compile(r"(scale|scales|zeros|zero_point|qweight|qzeros|g_idx|absmax|scale_inv)$")


@dataclass
class Layout:
    """Where everything is, once the headers are known to be sound.

    ``parts`` maps each Part that is used to the tensor that holds it.
    """

    format: str
    num_heads: int
    num_layers: int
    hidden_size: int
    has_bias: bool
    is_sequential: bool
    lm_head_rows: int | None
    shared_lm_head: bool
    dtype: torch.dtype
    parts: dict[Part, StoredTensor]
    warnings: list[str]

    @property
    def lm_head_parts(self) -> list[Part]:
        """The LM heads to read: one per head, one shared by all heads, or none."""
        if self.lm_head_rows is None:
            return []
        if self.shared_lm_head:
            return [SHARED_LM_HEAD]
        return [Part("lm_head", head, self.num_layers) for head in range(self.num_heads)]

    @property
    def expected_shapes(self) -> dict[Part, tuple[int, ...]]:
        """The shape of every part that heads of this size consist of."""
        hidden = self.hidden_size
        shapes: dict[Part, tuple[int, ...]] = {}
        for head in range(self.num_heads):
            for layer in range(self.num_layers):
                shapes[Part("block_weight", head, layer)] = (hidden, hidden)
                if self.has_bias:
                    shapes[Part("block_bias", head, layer)] = (hidden,)
            if self.is_sequential:
                shapes[Part("path_weight", head)] = (hidden, (head + 1) * hidden)
        for part in self.lm_head_parts:
            shapes[part] = (self.lm_head_rows or 0, hidden)
        return shapes


def build_layout(
    what: str, tensors: Mapping[str, StoredTensor], files: list[Path], config: Mapping[str, Any]
) -> Layout:
    """Check names, shapes and dtypes of all tensors and say where each part is.

    Heads, layers, biases and sizes are counted from the tensors; where tensors contradict each
    other, what most of them say is taken as expected and the rest is reported.

    Args:
        what: How the user knows these heads, for messages.
        tensors: Stored tensors by name, the target's already left out.
        files: The files looked at, for messages on missing tensors.
        config: config.json; only ``original_lm_head`` is used, which no tensor tells.

    Raises:
        HeadsError: Names every missing, extra, mis-shaped or mis-typed tensor at once.
    """
    fmt = sniff_format(tensors)
    if fmt is None:
        some = ", ".join(list(tensors)[:5]) or "none"
        raise HeadsError(
            f"{what}: no Medusa heads among the {len(tensors)} tensors (first names: {some}). "
            "Known are 0.0.linear.weight (Medusa), medusa_head.0.0.linear.weight (Medusa 1.0), "
            "medusa_heads.0.0.linear.weight (ModelOpt) and blocks.0.layers.0.weight (vLLM)."
        )

    found, problems = _find_parts(fmt, tensors)
    in_heads = [part for part in found if part not in (TOKEN_MAP, SHARED_LM_HEAD)]
    num_layers = _count_layers(fmt, in_heads)
    if fmt == "vllm":  # its names do not tell the layer of an LM head
        found = {
            part._replace(layer=num_layers) if part.kind == "lm_head" else part: tensor
            for part, tensor in found.items()
        }
    warnings = _settle_shared_lm_head(found, num_layers, config)
    lm_heads = [tensor for part, tensor in found.items() if part.kind.endswith("lm_head")]
    layout = Layout(
        format="medusa-2" if fmt == "medusa-v0.1" and not lm_heads else fmt,
        num_heads=1 + max(part.head for part in in_heads),
        num_layers=num_layers,
        hidden_size=_most_common(_hidden_sizes(found)),
        has_bias=any(part.kind == "block_bias" for part in in_heads),
        is_sequential=any(part.kind == "path_weight" for part in in_heads),
        lm_head_rows=_most_common(t.shape[0] for t in lm_heads if t.shape) if lm_heads else None,
        shared_lm_head=SHARED_LM_HEAD in found,
        dtype=torch.float32,
        parts=found,
        warnings=warnings,
    )

    expected = layout.expected_shapes
    where = files[0].name if len(files) == 1 else f"the {len(files)} files"
    for part, shape in expected.items():
        if part not in found:
            problems.append(f"{where}: {name_of(fmt, part)}: missing; expected {list(shape)}")
    for part, tensor in found.items():
        if part == TOKEN_MAP:
            problems += _check_token_map_header(tensor, layout.lm_head_rows)
        elif part in expected:
            problems += _check_header(tensor, expected[part])
        else:
            problems.append(
                f"{tensor}: extra tensor {list(tensor.shape)}; expected {num_layers} layer(s) in "
                f"each of the {layout.num_heads} head(s)"
            )
    if layout.is_sequential and not num_layers:
        problems.append(
            f"{where}: {name_of(fmt, Part('block_weight'))}: missing; the first layer of a "
            "sequential head reads the path"
        )
    raise_problems(what, problems)
    layout.dtype = _common_dtype(layout)
    return layout


def _find_parts(
    fmt: str, tensors: Mapping[str, StoredTensor]
) -> tuple[dict[Part, StoredTensor], list[str]]:
    """What each tensor is, and a line for each tensor that is nothing."""
    found: dict[Part, StoredTensor] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        part = parse_name(fmt, name)
        if part is None:
            hint = "; quantised heads are not supported" if _QUANTISED.search(name) else ""
            problems.append(
                f"{tensor}: unknown tensor {list(tensor.shape)}; not a name of format {fmt}{hint}"
            )
        elif part in found:
            problems.append(f"{tensor}: is also there as {found[part].name}")
        else:
            found[part] = tensor
    return found, problems


def _count_layers(fmt: str, parts: list[Part]) -> int:
    """The number of layers that most heads have."""
    counts: dict[int, int] = {}
    for part in parts:
        if part.kind.startswith("block_"):
            counts[part.head] = max(counts.get(part.head, 0), part.layer + 1)
    for part in parts:
        if part.kind == "lm_head":
            # {i}.{L}.weight tells L even where a block is missing.
            counts[part.head] = part.layer if fmt != "vllm" else counts.get(part.head, 0)
    return _most_common(counts.values())


def _settle_shared_lm_head(
    found: dict[Part, StoredTensor], num_layers: int, config: Mapping[str, Any]
) -> list[str]:
    """Leave in ``found`` either one shared LM head or one per head, and say what was odd.

    vLLM uses one LM head for all heads where the config says ``original_lm_head``. It reads it from
    ``lm_head.weight`` or from the LM head of head 0 and passes over all others
    (vllm/model_executor/models/medusa.py, ``load_weights``).
    """
    own = [part for part in found if part.kind == "lm_head"]
    first = Part("lm_head", 0, num_layers)
    original = config.get("original_lm_head") is True
    if SHARED_LM_HEAD in found and not original:
        if own:
            del found[SHARED_LM_HEAD]
            return [
                "lm_head.weight is not used: there are LM heads per head, and config.json does "
                "not say original_lm_head"
            ]
        return [
            "lm_head.weight is used for all heads, though config.json does not say "
            "original_lm_head: there are no LM heads per head"
        ]
    if not original or not (SHARED_LM_HEAD in found or first in found):
        return []
    if SHARED_LM_HEAD not in found:
        found[SHARED_LM_HEAD] = found[first]
    unused = [found[part].name for part in own if found[part] != found[SHARED_LM_HEAD]]
    for part in own:
        del found[part]
    if not unused:
        return []
    return [
        f"config.json says original_lm_head: {found[SHARED_LM_HEAD].name} is used for all heads; "
        f"not used: {', '.join(unused)}"
    ]


def _hidden_sizes(found: Mapping[Part, StoredTensor]) -> list[int]:
    """What each tensor says about the hidden size."""
    sizes: list[int] = []
    for part, tensor in found.items():
        if part.kind == "block_weight":
            sizes += tensor.shape
        elif part.kind == "path_weight":
            sizes += tensor.shape[:1]
        elif part != TOKEN_MAP:
            sizes += tensor.shape[-1:]
    return sizes


def _most_common(values: Iterable[int]) -> int:
    # Ties go to the larger value: a tensor is more likely cut off than grown. No values at all
    # (only scalars found) gives 0, which then fits no tensor.
    counts = Counter(values)
    return max(counts, key=lambda value: (counts[value], value), default=0)


def _check_header(tensor: StoredTensor, expected: tuple[int, ...]) -> list[str]:
    problems = []
    if tensor.shape != expected:
        problems.append(f"{tensor}: expected shape {list(expected)}, found {list(tensor.shape)}")
    if tensor.dtype not in FLOAT_DTYPES:
        kind = "integers" if tensor.dtype in INT_DTYPES else "a quantised or unknown type"
        problems.append(
            f"{tensor}: expected float16, bfloat16, float32 or float64, found {tensor.dtype_name} "
            f"({kind}; quantised heads are not supported)"
        )
    return problems


def _check_token_map_header(tensor: StoredTensor, lm_head_rows: int | None) -> list[str]:
    if len(tensor.shape) != 1 or tensor.shape == (0,):
        found = list(tensor.shape)
        return [f"{tensor}: expected one dimension of at least one token id, found shape {found}"]
    if tensor.dtype not in INT_DTYPES:
        return [f"{tensor}: expected integers, found {tensor.dtype_name}"]
    if lm_head_rows is not None and lm_head_rows < tensor.shape[0]:
        return [
            f"{tensor}: {tensor.shape[0]} token ids, but the LM heads have only {lm_head_rows} rows"
        ]
    return []


def _common_dtype(layout: Layout) -> torch.dtype:
    """The one dtype to use, with a warning where tensors differ."""
    dtypes = {t.dtype for part, t in layout.parts.items() if part != TOKEN_MAP}
    common = functools.reduce(torch.promote_types, dtypes)
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(dtype) for dtype in dtypes))
        layout.warnings.append(f"tensors of different types ({names}): all are read as {common}")
    return common


def config_warnings(what: str, config: Mapping[str, Any], layout: Layout) -> list[str]:
    """Where config.json disagrees with the tensors, naming both. The tensors are right.

    Raises:
        HeadsError: The config says that the LM heads cover some tokens only, and no tensor says
            which.
    """
    nested = config.get("medusa")
    nested = nested if isinstance(nested, Mapping) else {}
    rows = layout.lm_head_rows
    token_map = layout.parts.get(TOKEN_MAP)
    num_tokens = token_map.shape[0] if token_map else rows
    claims: list[tuple[str, Any, int | None]] = [
        ("medusa_num_heads", config.get("medusa_num_heads"), layout.num_heads),
        ("num_medusa_heads", nested.get("num_medusa_heads"), layout.num_heads),
        ("medusa_num_layers", config.get("medusa_num_layers"), layout.num_layers),
        ("num_medusa_layers", nested.get("num_medusa_layers"), layout.num_layers),
        ("hidden_size", config.get("hidden_size"), layout.hidden_size),
    ]
    if config.get("model_type") == "medusa":  # else num_hidden_layers is the target's
        claims.append(("num_heads", config.get("num_heads"), layout.num_heads))
        claims.append(("num_hidden_layers", config.get("num_hidden_layers"), layout.num_layers))
    if token_map:
        claims.append(("truncated_vocab_size", config.get("truncated_vocab_size"), num_tokens))
    if rows is not None and (token_map is None or rows != num_tokens):
        claims.append(("vocab_size", config.get("vocab_size"), rows))

    truncated, vocab = config.get("truncated_vocab_size"), config.get("vocab_size")
    if token_map is None and type(truncated) is int and truncated == rows and truncated != vocab:
        raise HeadsError(
            f"{what}: config.json says truncated_vocab_size {truncated} of vocab_size {vocab}, and "
            f"the LM heads have {rows} rows, but no tensor token_map says which tokens these are."
        )
    if token_map is None and truncated is not None and truncated != vocab:
        claims.append(("truncated_vocab_size", truncated, rows))

    warnings = [
        f"config.json says {key} {claim}, the tensors say {counted}: the tensors are followed"
        for key, claim, counted in claims
        if type(claim) is int and claim != counted
    ]
    # vLLM builds blocks without a bias unless the config asks for one, and then drops stored ones.
    bias = config.get("medusa_fc_bias", False if layout.format == "vllm" else None)
    if layout.num_layers and isinstance(bias, bool) and bias != layout.has_bias:
        warnings.append(
            f"config.json says medusa_fc_bias {str(bias).lower()}, the blocks have "
            f"{'a bias' if layout.has_bias else 'no bias'}: the tensors are followed"
        )
    head_type = config.get("head_type")
    counted_type = "sequential" if layout.is_sequential else "plain"
    if head_type is not None and head_type != counted_type:
        warnings.append(
            f"config.json says head_type {head_type!r}, the tensors are those of {counted_type} "
            "heads: the tensors are followed"
        )
    version_2 = str(config.get("version")) == "2"
    if version_2 and rows is not None:
        warnings.append(
            'config.json says version "2" (no LM heads in the file), the file holds LM heads of '
            f"{rows} rows: they are used"
        )
    if not version_2 and rows is None:
        warnings.append(
            'the file holds no LM heads, and config.json does not say version "2": the target\'s '
            "LM head is used"
        )
    return warnings
