"""Heads on disk: five formats that must load alike, and every way to refuse a bad checkpoint."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from vllm_medusa.heads.checkpoint import (
    HeadsError,
    check_against_target,
    inspect_heads,
    load_heads,
    non_finite_tensors,
    resolve_heads,
)
from vllm_medusa.heads.formats import Part, name_of, parse_name

HIDDEN, VOCAB = 8, 12
Tensors = dict[str, torch.Tensor]

# Prefix of the head number; format; config that is right for K = 3 heads of L = 2 layers.
INDEXED = {"medusa-v0.1": "", "medusa-1.0": "medusa_head.", "modelopt": "medusa_heads."}
FORMATS = (*INDEXED, "vllm")
TARGET = {"model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN), "lm_head.weight": torch.zeros(2)}


def make_heads(
    fmt: str = "medusa-v0.1",
    num_heads: int = 3,
    num_layers: int = 2,
    bias: bool = True,
    lm_heads: bool = True,
    seed: int = 0,
) -> Tensors:
    """Random heads; the same numbers in every format for the same arguments otherwise."""
    random = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    for i in range(num_heads):
        for layer in range(num_layers):
            block = f"{INDEXED.get(fmt, '')}{i}.{layer}.linear"
            if fmt == "vllm":
                block = f"blocks.{i}.layers.{layer}"
            tensors[f"{block}.weight"] = torch.randn(HIDDEN, HIDDEN, generator=random)
            if bias:
                tensors[f"{block}.bias"] = torch.randn(HIDDEN, generator=random)
        if lm_heads:
            name = f"lm_heads.{i}.weight"
            if fmt != "vllm":
                name = f"{INDEXED[fmt]}{i}.{num_layers}.weight"
            tensors[name] = torch.randn(VOCAB, HIDDEN, generator=random)
    return tensors


def make_config(fmt: str, num_heads: int = 3, num_layers: int = 2, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    if fmt == "vllm":
        config = {"model_type": "medusa", "num_heads": num_heads, "num_hidden_layers": num_layers}
        config |= {"hidden_size": HIDDEN, "vocab_size": VOCAB, "medusa_fc_bias": True}
    if fmt == "modelopt":
        nested = {"num_medusa_heads": num_heads, "num_medusa_layers": num_layers}
        config = {"model_type": "llama", "num_hidden_layers": 32, "medusa": nested}
    if fmt == "medusa-1.0":
        config |= {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": HIDDEN}
    return config | more


def write(
    folder: Path,
    tensors: Tensors,
    config: dict[str, Any] | None = None,
    file: str = "medusa_lm_head.safetensors",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".pt"):
        torch.save(tensors, folder / file)
    else:
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / file)
    return folder


def write_shards(folder: Path, tensors: Tensors, config: dict[str, Any], index: bool) -> Path:
    names = list(tensors)
    weight_map = {}
    for shard in range(3):
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        write(folder, {name: tensors[name] for name in names[shard::3]}, config, file)
        weight_map |= dict.fromkeys(names[shard::3], file)
    if index:
        text = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def assert_same(heads: Path, tensors: Tensors, num_heads: int = 3, num_layers: int = 2) -> None:
    """What is loaded is what v0.1 names for ``tensors`` say."""
    weights = load_heads(heads)
    assert weights.info == inspect_heads(heads)
    assert (weights.info.num_heads, weights.info.num_layers) == (num_heads, num_layers)
    assert weights.block_weight.shape == (num_heads, num_layers, HIDDEN, HIDDEN)
    for i in range(num_heads):
        for layer in range(num_layers):
            expected = tensors[f"{i}.{layer}.linear.weight"]
            torch.testing.assert_close(weights.block_weight[i, layer], expected, rtol=0, atol=0)
            if f"{i}.{layer}.linear.bias" in tensors:
                assert weights.block_bias is not None
                assert torch.equal(
                    weights.block_bias[i, layer], tensors[f"{i}.{layer}.linear.bias"]
                )
            else:
                assert weights.block_bias is None
        if f"{i}.{num_layers}.weight" in tensors:
            assert weights.lm_head is not None
            assert torch.equal(weights.lm_head[i], tensors[f"{i}.{num_layers}.weight"])
        else:
            assert weights.lm_head is None


def error_of(heads: Path | str, call: Any = inspect_heads, **more: Any) -> str:
    with pytest.raises(HeadsError) as error:
        call(heads, **more)
    assert str(heads) in str(error.value), "the message must say which heads were asked for"
    return str(error.value)


# Formats


@pytest.mark.parametrize("stored", ["safetensors", "pt", "index", "shards"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_all_formats_load_alike(tmp_path: Path, fmt: str, stored: str) -> None:
    config = make_config(fmt)
    tensors = make_heads(fmt)
    if stored in ("index", "shards"):
        write_shards(tmp_path, tensors, config, index=stored == "index")
    else:
        write(tmp_path, tensors, config, f"medusa_lm_head.{stored}")
    assert_same(tmp_path, make_heads())
    info = inspect_heads(tmp_path)
    assert info.format == fmt
    assert (info.hidden_size, info.vocab_size, info.draft_vocab_size) == (HIDDEN, VOCAB, None)
    assert info.own_lm_heads and not info.shared_lm_head and info.has_bias
    assert info.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert info.warnings == ()
    assert len(info.files) == (3 if stored in ("index", "shards") else 1)
    assert (info.dtype, info.logit_scale, info.base_model) == (torch.float32, 1.0, None)


def test_version_2_uses_the_targets_lm_head(tmp_path: Path) -> None:
    tensors = make_heads(lm_heads=False)
    base = {"version": "2", "base_model_name_or_path": "org/target"}
    write(tmp_path, tensors, make_config("medusa-v0.1") | base)
    assert_same(tmp_path, tensors)
    info = inspect_heads(tmp_path)
    assert (info.format, info.base_model, info.vocab_size) == ("medusa-2", "org/target", None)
    assert not info.own_lm_heads and info.warnings == ()


@pytest.mark.parametrize("fmt", FORMATS)
def test_no_bias(tmp_path: Path, fmt: str) -> None:
    write(tmp_path, make_heads(fmt, bias=False), make_config(fmt) | {"medusa_fc_bias": False})
    assert_same(tmp_path, make_heads(bias=False))
    assert not inspect_heads(tmp_path).has_bias and inspect_heads(tmp_path).warnings == ()


@pytest.mark.parametrize("fmt", FORMATS)
def test_zero_layers(tmp_path: Path, fmt: str) -> None:
    write(tmp_path, make_heads(fmt, num_layers=0), make_config(fmt, num_layers=0))
    assert_same(tmp_path, make_heads(num_layers=0), num_layers=0)
    assert inspect_heads(tmp_path).warnings == ()


def test_layers_of_a_head_may_share_their_weights(tmp_path: Path) -> None:
    tensors = make_heads()
    for i in range(3):
        for kind in ("weight", "bias"):
            tensors[f"{i}.1.linear.{kind}"] = tensors[f"{i}.0.linear.{kind}"]
    assert_same(write(tmp_path / "pt", tensors, {}, "medusa_lm_head.pt"), tensors)  # one storage
    assert_same(write(tmp_path / "st", tensors, {}), tensors)  # equal copies


@pytest.mark.parametrize("stored", ["single", "index", "pt"])
@pytest.mark.parametrize("fmt", ["medusa-1.0", "modelopt"])
def test_heads_inside_a_target(tmp_path: Path, fmt: str, stored: str) -> None:
    heads, config = make_heads(fmt), make_config(fmt)
    if stored == "index":
        # The target's shard is not even there.
        write(tmp_path, heads, config, "model-00001-of-00002.safetensors")
        weight_map = dict.fromkeys(heads, "model-00001-of-00002.safetensors")
        weight_map |= dict.fromkeys(TARGET, "model-00002-of-00002.safetensors")
        index = json.dumps({"weight_map": weight_map})
        (tmp_path / "model.safetensors.index.json").write_text(index)
    else:
        write(tmp_path, TARGET | heads, config, "m.pt" if stored == "pt" else "m.safetensors")
    assert_same(tmp_path, make_heads())
    (warning,) = inspect_heads(tmp_path).warnings
    assert "2 tensors of a target" in warning


def test_old_pt_format_without_zip(tmp_path: Path) -> None:
    write(tmp_path, {}, {})
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    tensors = make_heads()
    torch.save(tensors, tmp_path / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    assert_same(tmp_path, tensors)


def test_files_named_after_medusa_win(tmp_path: Path) -> None:
    write(tmp_path, TARGET, {}, "model.safetensors")
    write(tmp_path, make_heads(seed=1), {}, "medusa_lm_head.pt")
    assert_same(tmp_path, make_heads(seed=1))
    write(tmp_path, make_heads(seed=2), {}, "medusa_lm_head.safetensors")
    assert_same(tmp_path, make_heads(seed=2))


def test_trainer_files_are_not_heads(tmp_path: Path) -> None:
    write(tmp_path, {"state": torch.zeros(1)}, {}, "optimizer.pt")
    write(tmp_path, make_heads(), {}, "heads.pt")
    assert_same(tmp_path, make_heads())


def test_rank_paths_are_not_heads(tmp_path: Path) -> None:
    write(tmp_path, {"ranks": torch.zeros(1, 3)}, {}, "medusa_ranks.safetensors")
    write(tmp_path, make_heads("vllm"), {}, "model.safetensors")
    assert_same(tmp_path, make_heads())


# Sequential heads


def make_sequential(lm_heads: bool = True, num_layers: int = 2) -> Tensors:
    random = torch.Generator().manual_seed(1)
    paths = {
        f"{i}.path.weight": torch.randn(HIDDEN, (i + 1) * HIDDEN, generator=random)
        for i in range(3)
    }
    return make_heads(lm_heads=lm_heads, num_layers=num_layers) | paths


@pytest.mark.parametrize("lm_heads", [True, False])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_sequential_heads(tmp_path: Path, suffix: str, lm_heads: bool) -> None:
    tensors = make_sequential(lm_heads)
    config = make_config("medusa-v0.1", head_type="sequential")
    config |= {} if lm_heads else {"version": "2"}
    write(tmp_path, tensors, config, f"medusa_lm_head.{suffix}")
    assert_same(tmp_path, tensors)
    weights = load_heads(tmp_path)
    assert weights.info.is_sequential and weights.info.warnings == ()
    assert weights.info.format == ("medusa-v0.1" if lm_heads else "medusa-2")
    assert weights.info.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert weights.path_weight is not None and len(weights.path_weight) == 3
    for head, weight in enumerate(weights.path_weight):
        assert torch.equal(weight, tensors[f"{head}.path.weight"])
    narrow = load_heads(tmp_path, dtype=torch.bfloat16)
    assert narrow.path_weight is not None
    assert {weight.dtype for weight in narrow.path_weight} == {torch.bfloat16}


def test_plain_heads_read_no_path(tmp_path: Path) -> None:
    write(tmp_path, make_heads(), make_config("medusa-v0.1", head_type="plain"))
    weights = load_heads(tmp_path)
    assert weights.path_weight is None and not weights.info.is_sequential
    assert weights.info.warnings == ()


def test_bad_path_tensors_are_named_in_one_error(tmp_path: Path) -> None:
    tensors = make_sequential()
    tensors["0.path.weight"] = torch.zeros(HIDDEN, 2 * HIDDEN)
    del tensors["1.path.weight"]
    tensors["2.path.weight"] = torch.zeros(HIDDEN, 3 * HIDDEN, dtype=torch.int64)
    tensors["0.path.bias"] = torch.zeros(HIDDEN)
    message = error_of(write(tmp_path, tensors, {}))
    file = "medusa_lm_head.safetensors"
    assert "4 problem(s)" in message
    assert f"{file}: 0.path.weight: expected shape [8, 8], found [8, 16]" in message
    assert f"{file}: 1.path.weight: missing; expected [8, 16]" in message
    assert f"{file}: 2.path.weight: expected float16" in message
    assert f"{file}: 0.path.bias: unknown tensor [8]" in message


def test_path_tensor_of_a_head_that_is_not_there(tmp_path: Path) -> None:
    tensors = make_sequential() | {"3.path.weight": torch.zeros(HIDDEN, 4 * HIDDEN)}
    message = error_of(write(tmp_path, tensors, {}))
    for name in ("3.0.linear.weight", "3.1.linear.bias", "3.2.weight"):
        assert f"{name}: missing" in message


@pytest.mark.parametrize("fmt", ["medusa-1.0", "modelopt", "vllm"])
def test_other_formats_have_no_path_tensors(tmp_path: Path, fmt: str) -> None:
    name = f"{INDEXED.get(fmt, '')}0.path.weight"
    tensors = make_heads(fmt) | {name: torch.zeros(HIDDEN, HIDDEN)}
    message = error_of(write(tmp_path, tensors, {}))
    assert f"{name}: unknown tensor [8, 8]; not a name of format {fmt}" in message


@pytest.mark.parametrize("lm_heads", [True, False])
def test_sequential_heads_need_a_layer(tmp_path: Path, lm_heads: bool) -> None:
    tensors = make_sequential(lm_heads, num_layers=0)
    message = error_of(write(tmp_path, tensors, {}))
    assert "0.0.linear.weight: missing; the first layer of a sequential head" in message


@pytest.mark.parametrize("said", ["plain", "sequential", "hydra"])
def test_head_type_that_disagrees(tmp_path: Path, said: str) -> None:
    is_sequential = said == "plain"
    tensors = make_sequential() if is_sequential else make_heads()
    write(tmp_path, tensors, make_config("medusa-v0.1", head_type=said))
    assert_same(tmp_path, tensors)
    (warning,) = inspect_heads(tmp_path).warnings
    counted = "sequential" if is_sequential else "plain"
    assert f"says head_type {said!r}, the tensors are those of {counted} heads" in warning


@given(
    fmt=st.sampled_from(FORMATS),
    head=st.integers(0, 999),
    layer=st.integers(0, 999),
    kind=st.sampled_from(["block_weight", "block_bias", "lm_head", "path_weight"]),
)
def test_names_and_parts_are_inverse(fmt: str, head: int, layer: int, kind: str) -> None:
    if kind == "path_weight":
        fmt = "medusa-v0.1"
    if kind == "path_weight" or (fmt == "vllm" and kind == "lm_head"):
        layer = 0  # its names do not tell
    part = Part(kind, head, layer)
    assert parse_name(fmt, name_of(fmt, part)) == part


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    fmt=st.sampled_from(FORMATS),
    num_heads=st.integers(1, 12),  # two digits: heads must not be sorted as text
    num_layers=st.integers(0, 3),
    bias=st.booleans(),
    stored=st.sampled_from(["safetensors", "pt"]),
)
def test_counts_come_from_the_tensors(
    tmp_path: Path, fmt: str, num_heads: int, num_layers: int, bias: bool, stored: str
) -> None:
    shutil.rmtree(tmp_path)
    tensors = make_heads(fmt, num_heads, num_layers, bias)
    write(tmp_path, tensors, {"medusa_num_heads": 99}, f"medusa_lm_head.{stored}")
    assert_same(
        tmp_path, make_heads("medusa-v0.1", num_heads, num_layers, bias), num_heads, num_layers
    )
    assert (
        f"medusa_num_heads 99, the tensors say {num_heads}" in inspect_heads(tmp_path).warnings[0]
    )


def test_importing_needs_no_vllm() -> None:
    code = (
        "import sys, vllm_medusa.heads.checkpoint; "
        "sys.exit(any(m in sys.modules for m in ('vllm', 'huggingface_hub', 'transformers')))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# Draft vocabulary and shared LM heads


@pytest.mark.parametrize("stored_rows", ["whole", "truncated"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_token_map(tmp_path: Path, fmt: str, stored_rows: str, suffix: str) -> None:
    token_map = torch.tensor([7, 0, 11, 3], dtype=torch.int32)
    tensors = make_heads(fmt)
    whole = torch.stack([t for name, t in tensors.items() if t.shape == (VOCAB, HIDDEN)])
    if stored_rows == "truncated":
        tensors = {n: t[token_map] if t.shape == (VOCAB, HIDDEN) else t for n, t in tensors.items()}
    tensors["token_map"] = token_map
    config = make_config(fmt) | {"vocab_size": VOCAB, "truncated_vocab_size": 4}
    write(tmp_path, tensors, config, f"medusa_lm_head.{suffix}")

    weights = load_heads(tmp_path)
    assert weights.lm_head is not None and weights.token_map is not None
    assert torch.equal(weights.lm_head, whole[:, token_map])
    assert weights.token_map.tolist() == [7, 0, 11, 3] and weights.token_map.dtype == torch.int64
    info = weights.info
    assert (info.draft_vocab_size, info.max_token_id, info.warnings) == (4, 11, ())
    assert info.vocab_size == (VOCAB if stored_rows == "whole" else 4)
    stored = load_heads(tmp_path, all_rows=True)
    assert stored.lm_head is not None
    assert torch.equal(stored.lm_head, whole if stored_rows == "whole" else whole[:, token_map])
    for rows in (slice(1, 3), slice(0, 2), slice(2, 9), slice(3, 3)):
        part = load_heads(tmp_path, lm_head_rows=rows)
        assert part.lm_head is not None and part.token_map is not None
        assert torch.equal(part.lm_head, whole[:, token_map[rows]])
        assert torch.equal(part.token_map, weights.token_map)


def test_token_map_with_the_targets_lm_head(tmp_path: Path) -> None:
    tensors = make_heads(lm_heads=False) | {"token_map": torch.tensor([5, 2])}
    write(tmp_path, tensors, {"version": "2"})
    weights = load_heads(tmp_path, lm_head_rows=slice(0, 1))
    assert weights.token_map is not None and weights.token_map.tolist() == [5, 2]
    assert weights.lm_head is None
    info = weights.info
    assert (info.format, info.draft_vocab_size, info.vocab_size) == ("medusa-2", 2, None)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    start=st.none() | st.integers(-15, 15),
    stop=st.none() | st.integers(-15, 15),
    suffix=st.sampled_from(["safetensors", "pt"]),
)
def test_rows_of_the_lm_head(
    tmp_path: Path, start: int | None, stop: int | None, suffix: str
) -> None:
    tensors = make_heads()
    shutil.rmtree(tmp_path)
    write(tmp_path, tensors, {}, f"medusa_lm_head.{suffix}")
    weights = load_heads(tmp_path, lm_head_rows=slice(start, stop))
    assert weights.lm_head is not None
    for i in range(3):
        assert torch.equal(weights.lm_head[i], tensors[f"{i}.2.weight"][start:stop])


def test_rows_with_steps_are_refused(tmp_path: Path) -> None:
    write(tmp_path, make_heads(), {})
    with pytest.raises(ValueError, match="step 2"):
        load_heads(tmp_path, lm_head_rows=slice(0, 8, 2))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_lm_head_for_all_heads(tmp_path: Path, name: str) -> None:
    one = torch.randn(VOCAB, HIDDEN)
    tensors = make_heads("vllm", lm_heads=False) | {name: one}
    write(tmp_path, tensors, make_config("vllm", original_lm_head=True))
    weights = load_heads(tmp_path)
    assert weights.lm_head is not None and torch.equal(weights.lm_head, one[None])
    info = weights.info
    assert info.shared_lm_head and info.own_lm_heads and info.warnings == ()
    assert info.num_parameters == sum(tensor.numel() for tensor in tensors.values())


def test_original_lm_head_reads_the_first_as_vllm_does(tmp_path: Path) -> None:
    tensors = make_heads("vllm")
    write(tmp_path, tensors, make_config("vllm", original_lm_head=True))
    weights = load_heads(tmp_path)
    assert weights.lm_head is not None
    assert torch.equal(weights.lm_head, tensors["lm_heads.0.weight"][None])
    (warning,) = weights.info.warnings
    assert "not used: lm_heads.1.weight, lm_heads.2.weight" in warning


def test_shared_lm_head_without_the_config_saying_so(tmp_path: Path) -> None:
    one = {"lm_head.weight": torch.ones(VOCAB, HIDDEN)}
    write(tmp_path / "one", make_heads("vllm", lm_heads=False) | one, make_config("vllm"))
    weights = load_heads(tmp_path / "one")
    assert weights.info.shared_lm_head and "original_lm_head" in weights.info.warnings[0]
    write(tmp_path / "both", make_heads("vllm") | one, make_config("vllm"))
    assert_same(tmp_path / "both", make_heads())
    assert "lm_head.weight is not used" in inspect_heads(tmp_path / "both").warnings[0]


def test_first_lm_head_alone_is_not_enough_for_all(tmp_path: Path) -> None:
    tensors = make_heads("vllm")
    del tensors["lm_heads.1.weight"], tensors["lm_heads.2.weight"]
    message = error_of(write(tmp_path, tensors, make_config("vllm")))
    assert "lm_heads.1.weight: missing; expected [12, 8]" in message
    assert "lm_heads.2.weight: missing; expected [12, 8]" in message


@pytest.mark.parametrize(
    ("token_map", "expected"),
    [
        (torch.zeros(2, 2, dtype=torch.int64), "found shape [2, 2]"),
        (torch.zeros(0, dtype=torch.int64), "found shape [0]"),
        (torch.tensor([1.0, 2.0]), "expected integers, found F32"),
        (torch.tensor([1, -4, -2]), "2 negative token id(s), the least -4"),
        (torch.tensor([1, 9, 9, 2]), "4 token ids, only 3 different; repeated: 9"),
        (torch.tensor([1, 12]), "token id 12, but the LM heads have 12 rows"),
        (torch.arange(13), "13 token ids, but the LM heads have only 12 rows"),
    ],
)
def test_bad_token_map(tmp_path: Path, token_map: torch.Tensor, expected: str) -> None:
    message = error_of(write(tmp_path, make_heads() | {"token_map": token_map}, {}))
    assert "medusa_lm_head.safetensors: token_map: " in message and expected in message


def test_truncated_without_token_map(tmp_path: Path) -> None:
    config = make_config("vllm", truncated_vocab_size=VOCAB) | {"vocab_size": 40}
    message = error_of(write(tmp_path, make_heads("vllm"), config))
    assert "truncated_vocab_size 12 of vocab_size 40" in message and "token_map" in message


# Config


def test_config_that_lies_is_a_warning(tmp_path: Path) -> None:
    config = {"num_heads": 2, "num_hidden_layers": 9, "hidden_size": 16, "vocab_size": 99}
    config |= {"model_type": "medusa", "medusa_fc_bias": False, "logit_scale": 0.5}
    write(tmp_path, make_heads("vllm"), config)
    assert_same(tmp_path, make_heads())
    info = inspect_heads(tmp_path)
    text = "\n".join(info.warnings)
    for key, claim, counted in [
        ("num_heads", 2, 3),
        ("num_hidden_layers", 9, 2),
        ("hidden_size", 16, HIDDEN),
        ("vocab_size", 99, VOCAB),
    ]:
        assert f"config.json says {key} {claim}, the tensors say {counted}" in text
    assert "medusa_fc_bias false, the blocks have a bias" in text
    assert len(info.warnings) == 5 and info.logit_scale == 0.5


def test_version_2_that_disagrees(tmp_path: Path) -> None:
    write(tmp_path / "with", make_heads(), {"version": "2"})
    assert "LM heads of 12 rows" in inspect_heads(tmp_path / "with").warnings[0]
    write(tmp_path / "without", make_heads(lm_heads=False), {})
    assert "no LM heads" in inspect_heads(tmp_path / "without").warnings[0]


def test_no_config(tmp_path: Path) -> None:
    assert_same(write(tmp_path, make_heads()), make_heads())
    assert "no config.json" in inspect_heads(tmp_path).warnings[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "config.json: cannot be read as JSON"),
        ("[1]", "config.json: expected an object, found list"),
        ('{"logit_scale": "big"}', "logit_scale must be above 0, found 'big'"),
        ('{"logit_scale": 0}', "logit_scale must be above 0, found 0"),
        ('{"logit_scale": NaN}', "logit_scale must be above 0, found nan"),
    ],
)
def test_bad_config(tmp_path: Path, text: str, expected: str) -> None:
    write(tmp_path, make_heads())
    (tmp_path / "config.json").write_text(text)
    assert expected in error_of(tmp_path)


# Bad tensors


@pytest.mark.parametrize("fmt", FORMATS)
def test_all_bad_tensors_are_named_in_one_error(tmp_path: Path, fmt: str) -> None:
    names = list(make_heads(fmt))  # per head: weight, bias, weight, bias, LM head
    tensors = make_heads(fmt)
    del tensors[names[1]]
    tensors[names[5]] = torch.zeros(HIDDEN, HIDDEN + 1)
    tensors[names[6]] = torch.zeros(HIDDEN, dtype=torch.int64)
    tensors[names[14]] = torch.zeros(VOCAB + 1, HIDDEN)
    extra = f"{INDEXED.get(fmt, '')}0.surprise"
    tensors[extra] = torch.zeros(2)
    message = error_of(write(tmp_path, tensors, {}))
    file = "medusa_lm_head.safetensors"
    assert "5 problem(s)" in message
    assert f"{file}: {names[1]}: missing; expected [8]" in message
    assert f"{file}: {names[5]}: expected shape [8, 8], found [8, 9]" in message
    assert f"{file}: {names[6]}: expected float16, bfloat16" in message and "found I64" in message
    assert f"{file}: {names[14]}: expected shape [12, 8], found [13, 8]" in message
    assert f"{file}: {extra}: unknown tensor [2]" in message


def test_gap_in_the_heads(tmp_path: Path) -> None:
    tensors = {name: t for name, t in make_heads().items() if not name.startswith("1.")}
    message = error_of(write(tmp_path, tensors, {}))
    assert "5 problem(s)" in message
    for name in ("1.0.linear.weight", "1.0.linear.bias", "1.1.linear.bias", "1.2.weight"):
        assert f"{name}: missing" in message


def test_a_head_with_another_number_of_layers(tmp_path: Path) -> None:
    tensors = make_heads(num_layers=1)
    tensors["1.1.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
    tensors["1.1.linear.bias"] = torch.zeros(HIDDEN)
    tensors["1.2.weight"] = tensors.pop("1.1.weight")
    message = error_of(write(tmp_path, tensors, {}))
    for name in ("1.1.linear.weight", "1.1.linear.bias", "1.2.weight"):
        assert f"{name}: extra tensor" in message
    assert "1 layer(s) in each of the 3 head(s)" in message
    assert "1.1.weight: missing; expected [12, 8]" in message


def test_a_missing_block_is_not_taken_for_fewer_layers(tmp_path: Path) -> None:
    tensors = {name: t for name, t in make_heads().items() if ".1.linear" not in name}
    message = error_of(write(tmp_path, tensors, {}))
    for head in range(3):
        assert f"{head}.1.linear.weight: missing; expected [8, 8]" in message


def test_at_most_twenty_problems_are_written_out(tmp_path: Path) -> None:
    tensors = make_heads() | {f"odd.{i}": torch.zeros(1) for i in range(33)}
    message = error_of(write(tmp_path, tensors, {}))
    assert "33 problem(s)" in message and message.endswith("and 13 more")
    assert message.count("unknown tensor") == 20


def test_mixed_formats(tmp_path: Path) -> None:
    tensors = make_heads() | {"blocks.0.layers.0.weight": torch.zeros(HIDDEN, HIDDEN)}
    message = error_of(write(tmp_path, tensors, {}))
    assert (
        "blocks.0.layers.0.weight: unknown tensor [8, 8]; not a name of format medusa-v0.1"
        in message
    )


def test_quantised_heads(tmp_path: Path) -> None:
    tensors = make_heads()
    tensors["0.0.linear.weight"] = tensors["0.0.linear.weight"].to(torch.float8_e4m3fn)
    tensors["0.0.linear.weight_scale"] = torch.ones(1)
    for suffix, dtype in (("safetensors", "F8_E4M3"), ("pt", "float8_e4m3fn")):
        folder = write(tmp_path / suffix, tensors, {}, f"medusa_lm_head.{suffix}")
        message = error_of(folder)
        assert "0.0.linear.weight: expected float16" in message and f"found {dtype}" in message
        assert "0.0.linear.weight_scale: unknown tensor [1]" in message
        assert message.count("quantised heads are not supported") == 2


def test_a_target_without_heads(tmp_path: Path) -> None:
    message = error_of(write(tmp_path, TARGET, {}, "model.safetensors"))
    assert "no Medusa heads among the 2 tensors" in message and "model.embed_tokens" in message


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_non_finite_values_are_counted(tmp_path: Path, suffix: str) -> None:
    tensors = make_heads()
    tensors["0.1.linear.bias"][2] = float("nan")
    tensors["2.2.weight"][1, :3] = float("-inf")
    write(tmp_path, tensors, {}, f"medusa_lm_head.{suffix}")
    inspect_heads(tmp_path)  # headers only
    message = error_of(tmp_path, load_heads)
    assert f"medusa_lm_head.{suffix}: 0.1.linear.bias: 1 of 8 values are NaN" in message
    assert f"medusa_lm_head.{suffix}: 2.2.weight: 3 of 96 values are NaN" in message
    assert [line.split(": ")[1] for line in non_finite_tensors(tmp_path)] == [
        "0.1.linear.bias",
        "2.2.weight",
    ]
    error_of(tmp_path, load_heads, lm_head_rows=slice(0, 1))  # the bias remains


def test_dtype(tmp_path: Path) -> None:
    tensors = {name: t.to(torch.bfloat16) for name, t in make_heads().items()}
    write(tmp_path / "a", tensors, {})
    assert load_heads(tmp_path / "a").block_weight.dtype == torch.bfloat16
    weights = load_heads(tmp_path / "a", dtype=torch.float32)
    assert torch.equal(weights.block_weight[1, 1], tensors["1.1.linear.weight"].float())
    tensors["0.0.linear.bias"] = torch.full((HIDDEN,), 1e6)
    write(tmp_path / "b", tensors, {})
    info = inspect_heads(tmp_path / "b")
    assert info.dtype == torch.float32
    assert "torch.bfloat16, torch.float32" in info.warnings[0]
    message = error_of(tmp_path / "b", load_heads, dtype=torch.float16)
    assert "0.0.linear.bias: 8 of 8 values are too large for torch.float16" in message


# Bad files


def test_no_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    message = error_of(tmp_path)
    assert "medusa_lm_head.safetensors" in message and "*.pt" in message
    assert "The folder holds: pytorch_model.bin." in message


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("keep", [0, 5, 100, 2000])
def test_truncated_files(tmp_path: Path, suffix: str, keep: int) -> None:
    write(tmp_path, make_heads(), {}, f"medusa_lm_head.{suffix}")
    file = tmp_path / f"medusa_lm_head.{suffix}"
    file.write_bytes(file.read_bytes()[:keep])
    message = error_of(tmp_path)
    assert file.name in message and "damaged" in message


def test_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "medusa_lm_head.safetensors").write_text(pointer)
    assert "git lfs pull" in error_of(tmp_path)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/nonexistent/never", "w"))


def test_a_pickle_with_code_is_not_run(tmp_path: Path) -> None:
    torch.save({"0.0.linear.weight": Harmful()}, tmp_path / "medusa_lm_head.pt")
    assert "medusa_lm_head.pt: not loaded" in error_of(tmp_path)
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps(Harmful()))
    assert "medusa_lm_head.pt: not loaded" in error_of(tmp_path)


def test_pt_files_that_are_no_state_dict(tmp_path: Path) -> None:
    torch.save([torch.zeros(1)], tmp_path / "medusa_lm_head.pt")
    assert "expected a state_dict, found list" in error_of(tmp_path)
    torch.save({"epoch": 3, "s": torch.eye(2).to_sparse()}, tmp_path / "medusa_lm_head.pt")
    message = error_of(tmp_path)
    assert "medusa_lm_head.pt: epoch: expected a tensor, found int" in message
    assert "medusa_lm_head.pt: s: torch.sparse_coo tensor" in message


def test_several_candidates(tmp_path: Path) -> None:
    write(tmp_path, make_heads(), {}, "a.pt")
    write(tmp_path, make_heads(), {}, "b.pt")
    assert "several .pt files (a.pt, b.pt)" in error_of(tmp_path)


def test_shards(tmp_path: Path) -> None:
    write_shards(tmp_path / "lost", make_heads(), {}, index=False)
    (tmp_path / "lost" / "model-00002-of-00003.safetensors").unlink()
    assert "shards are missing: model-00002-of-00003.safetensors" in error_of(tmp_path / "lost")

    write_shards(tmp_path / "index", make_heads(), {}, index=True)
    (tmp_path / "index" / "model-00002-of-00003.safetensors").unlink()
    message = error_of(tmp_path / "index")
    assert "index.json names files that are missing: model-00002-of-00003.safetensors" in message

    write(tmp_path / "twice", make_heads(), {}, "a.safetensors")
    write(tmp_path / "twice", {"0.0.linear.bias": torch.zeros(HIDDEN)}, {}, "b.safetensors")
    message = error_of(tmp_path / "twice")
    assert "0.0.linear.bias is in both a.safetensors and b.safetensors" in message


def test_index_that_disagrees_with_its_files(tmp_path: Path) -> None:
    write_shards(tmp_path, make_heads(), {}, index=True)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["3.0.linear.bias"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    message = error_of(tmp_path)
    assert "model-00001-of-00003.safetensors: 3.0.linear.bias: in the index, but not" in message
    weight_map["3.0.linear.bias"] = "../elsewhere.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "'../elsewhere.safetensors' is not the name of a file" in error_of(tmp_path)
    index.write_text("{}")
    assert "no weight_map" in error_of(tmp_path)


# Where the heads are


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "heads@v2", make_heads(), {})
    assert resolve_heads(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert inspect_heads("heads@v2").source == "heads@v2"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_heads("~/heads@v2") == folder
    message = error_of(str(folder / "config.json"), resolve_heads)
    assert f'a file. Give the folder that holds it: "{folder}"' in message
    assert "no such folder" in error_of(str(tmp_path / "missing"), resolve_heads)
    assert "no such folder" in error_of("./missing", resolve_heads)
    assert "empty" in error_of("", resolve_heads)


@pytest.mark.parametrize(
    ("heads", "revision", "asked"),
    [("org/name", None, None), ("org/name@v1", None, "v1"), ("org/name", "v2", "v2")],
)
def test_hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heads: str,
    revision: str | None,
    asked: str | None,
) -> None:
    calls = []

    def snapshot_download(repo: str, **arguments: Any) -> str:
        calls.append((repo, arguments))
        return str(write(tmp_path, make_heads(), {}))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    info = inspect_heads(heads, revision)
    assert (info.path, info.source) == (tmp_path, heads)
    ((repo, arguments),) = calls
    assert (repo, arguments["revision"]) == ("org/name", asked)
    assert not any(pattern.endswith(".bin") for pattern in arguments["allow_patterns"])
    assert {"config.json", "medusa_tree.json", "*.pt"} <= set(arguments["allow_patterns"])


def test_hub_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, **_: Any) -> str:
        raise OSError(f"401 Client Error.\n\nno access to {repo}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    message = error_of("foo/bar@rev", resolve_heads)
    assert (
        'medusa heads "foo/bar@rev": not a folder here, and not to be had from the hub' in message
    )
    assert "no access to foo/bar" in message and "Give a folder that holds config.json" in message
    assert 'at revision "x"' in error_of("foo/bar", resolve_heads, revision="x")
    message = error_of("foo/bar@rev", resolve_heads, revision="x")
    assert '"rev"' in message and '"x"' in message


# Heads and target


def check(heads: Path, hidden_size: int = HIDDEN, vocab_size: int = VOCAB) -> None:
    info = inspect_heads(heads)
    check_against_target(info, hidden_size=hidden_size, vocab_size=vocab_size, target="org/target")


def check_fails(heads: Path, *expected: str, **sizes: int) -> None:
    with pytest.raises(HeadsError) as error:
        check(heads, **sizes)
    for text in (str(heads), "org/target", *expected):
        assert text in str(error.value)


def test_heads_must_fit_the_target(tmp_path: Path) -> None:
    heads = write(tmp_path, make_heads(), {"base_model_name_or_path": "org/other"})
    check(heads)
    check_fails(heads, "hidden size 8", "16 in the target", "org/other", hidden_size=16)
    check_fails(heads, "vocabulary of 12", "one of 13", vocab_size=13)


def test_draft_vocabulary_must_fit_the_target(tmp_path: Path) -> None:
    shared = make_heads(lm_heads=False)
    heads = write(tmp_path / "shared", shared | {"token_map": torch.tensor([0, 4, 11])}, {})
    check(heads)
    check(heads, vocab_size=1000)
    check_fails(heads, "holds 3 token ids", "vocabulary 2", vocab_size=2)
    check_fails(heads, "token id 11", "ends at 10", vocab_size=11)

    whole = make_heads() | {"token_map": torch.tensor([0, 4])}
    heads = write(tmp_path / "whole", whole, {})
    check(heads)
    check_fails(heads, "vocabulary of 12", "one of 13", vocab_size=13)

    truncated = make_heads() | {"token_map": torch.arange(100, 112)}
    check(write(tmp_path / "truncated", truncated, {}), vocab_size=1000)
