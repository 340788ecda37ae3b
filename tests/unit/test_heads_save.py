"""``save_heads``: what is written in any format is what ``load_heads`` reads, or nothing at all."""

import json
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from vllm_medusa.heads.checkpoint import HeadsError, inspect_heads, load_heads
from vllm_medusa.heads.formats import FORMATS
from vllm_medusa.heads.save import save_heads

HIDDEN, VOCAB = 8, 12
OWN_LM_HEADS = tuple(fmt for fmt in FORMATS if fmt != "medusa-2")
SEQUENTIAL = ("medusa-v0.1", "medusa-2")
FILES = ["config.json", "medusa_lm_head.safetensors"]


def make_weights(
    fmt: str,
    *,
    num_heads: int = 3,
    num_layers: int = 2,
    bias: bool = True,
    sequential: bool = False,
    num_lm_heads: int | None = None,
    rows: int = VOCAB,
    token_map: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Random arguments of ``save_heads``; LM heads where the format has some."""
    torch.manual_seed(0)
    weights: dict[str, Any] = {
        "block_weight": torch.randn(num_heads, num_layers, HIDDEN, HIDDEN).to(dtype)
    }
    if bias:
        weights["block_bias"] = torch.randn(num_heads, num_layers, HIDDEN).to(dtype)
    if sequential:
        weights["path_weight"] = [
            torch.randn(HIDDEN, number * HIDDEN).to(dtype) for number in range(1, num_heads + 1)
        ]
    if fmt != "medusa-2":
        weights["lm_head"] = torch.randn(num_lm_heads or num_heads, rows, HIDDEN).to(dtype)
    if token_map is not None:
        weights["token_map"] = torch.tensor(token_map)
    return weights


def assert_saved(folder: Path, fmt: str, saved: dict[str, Any]) -> None:
    """Every tensor that is read is the one that was saved, in the same format and type."""
    loaded = load_heads(folder, all_rows=True)
    assert loaded.info.format == fmt and loaded.info.warnings == ()
    assert loaded.info.dtype == saved["block_weight"].dtype
    for name in ("block_weight", "block_bias", "lm_head", "token_map"):
        expected, found = saved.get(name), getattr(loaded, name)
        if expected is None:
            assert found is None, name
        else:
            assert found.dtype == expected.dtype and torch.equal(found, expected), name
    assert (loaded.path_weight is None) == ("path_weight" not in saved)
    for found, expected in zip(loaded.path_weight or [], saved.get("path_weight", []), strict=True):
        assert torch.equal(found, expected)
    assert sorted(path.name for path in folder.iterdir()) == FILES


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def error_of(folder: Path, fmt: str, saved: dict[str, Any]) -> str:
    with pytest.raises(HeadsError) as error:
        save_heads(folder, fmt, **saved)
    assert str(folder) in str(error.value)
    assert not folder.exists() and list(folder.parent.iterdir()) == []
    return str(error.value)


# What is read back


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fmt", FORMATS)
def test_plain_heads(tmp_path: Path, fmt: str, bias: bool, dtype: torch.dtype) -> None:
    saved = make_weights(fmt, bias=bias, dtype=dtype)
    save_heads(tmp_path / "new" / "heads", fmt, **saved)
    assert_saved(tmp_path / "new" / "heads", fmt, saved)


@pytest.mark.parametrize("token_map", [None, [3, 11, 0]])
@pytest.mark.parametrize("fmt", SEQUENTIAL)
def test_sequential_heads(tmp_path: Path, fmt: str, token_map: list[int] | None) -> None:
    saved = make_weights(fmt, sequential=True, token_map=token_map)
    save_heads(tmp_path, fmt, **saved)
    assert_saved(tmp_path, fmt, saved)
    assert inspect_heads(tmp_path).is_sequential
    assert config_of(tmp_path)["head_type"] == "sequential"


@pytest.mark.parametrize("fmt", OWN_LM_HEADS)
def test_no_layers(tmp_path: Path, fmt: str) -> None:
    saved = make_weights(fmt, num_layers=0, bias=False)
    save_heads(tmp_path, fmt, **saved)
    assert_saved(tmp_path, fmt, saved)
    assert inspect_heads(tmp_path).num_layers == 0


@pytest.mark.parametrize("rows", [VOCAB, 3])
@pytest.mark.parametrize("fmt", FORMATS)
def test_token_map(tmp_path: Path, fmt: str, rows: int) -> None:
    saved = make_weights(fmt, rows=rows, token_map=[7, 0, 9])
    save_heads(tmp_path, fmt, **saved, config={"vocab_size": VOCAB})
    assert_saved(tmp_path, fmt, saved)
    assert config_of(tmp_path)["vocab_size"] == VOCAB
    assert inspect_heads(tmp_path).draft_vocab_size == 3


@pytest.mark.parametrize("num_layers", [0, 1])
@pytest.mark.parametrize("fmt", OWN_LM_HEADS)
def test_one_lm_head_for_all_heads(tmp_path: Path, fmt: str, num_layers: int) -> None:
    saved = make_weights(fmt, num_lm_heads=1, num_layers=num_layers, bias=False)
    save_heads(tmp_path, fmt, **saved)
    one_is_enough = fmt == "vllm" and num_layers > 0
    assert inspect_heads(tmp_path).shared_lm_head == one_is_enough
    if not one_is_enough:
        saved["lm_head"] = saved["lm_head"].expand(3, -1, -1)
    assert_saved(tmp_path, fmt, saved)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_single_head(tmp_path: Path, fmt: str) -> None:
    saved = make_weights(fmt, num_heads=1)
    save_heads(tmp_path, fmt, **saved)
    assert_saved(tmp_path, fmt, saved)


def test_views_and_other_layouts_in_memory(tmp_path: Path) -> None:
    saved = make_weights("medusa-v0.1")
    saved["block_weight"] = saved["block_weight"].mT
    saved["lm_head"] = saved["lm_head"].requires_grad_()
    saved["token_map"] = torch.tensor([1, 0], dtype=torch.int32)
    save_heads(tmp_path, "medusa-v0.1", **saved)
    assert_saved(tmp_path, "medusa-v0.1", saved | {"token_map": torch.tensor([1, 0])})


def test_one_memory_for_all_heads(tmp_path: Path) -> None:
    saved = make_weights("modelopt")
    for name in ("block_weight", "block_bias", "lm_head"):
        saved[name] = saved[name][:1].expand_as(saved[name])
    save_heads(tmp_path, "modelopt", **saved)
    assert_saved(tmp_path, "modelopt", saved)


# Names and config, as others read them


def test_tensor_names(tmp_path: Path) -> None:
    expected = {
        "medusa-v0.1": ["0.0.linear.bias", "0.0.linear.weight", "0.1.weight"],
        "medusa-2": ["0.0.linear.bias", "0.0.linear.weight"],
        "medusa-1.0": [
            "medusa_head.0.0.linear.bias",
            "medusa_head.0.0.linear.weight",
            "medusa_head.0.1.weight",
        ],
        "modelopt": [
            "medusa_heads.0.0.linear.bias",
            "medusa_heads.0.0.linear.weight",
            "medusa_heads.0.1.weight",
        ],
        "vllm": ["blocks.0.layers.0.bias", "blocks.0.layers.0.weight", "lm_heads.0.weight"],
    }
    for fmt, names in expected.items():
        save_heads(tmp_path / fmt, fmt, **make_weights(fmt, num_heads=1, num_layers=1))
        with safe_open(tmp_path / fmt / "medusa_lm_head.safetensors", "pt") as file:
            assert sorted(file.keys()) == names
            assert file.metadata() == {"format": "pt"}


def test_config_of_each_format(tmp_path: Path) -> None:
    sizes = {"hidden_size": HIDDEN, "base_model_name_or_path": "org/target", "seed": 1}
    counts = {"medusa_num_heads": 3, "medusa_num_layers": 2}
    vllm = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "logit_scale": 1.0,
    }
    expected = {
        "medusa-v0.1": sizes | counts | {"vocab_size": VOCAB},
        "medusa-2": sizes | counts | {"version": "2"},
        "medusa-1.0": sizes | counts | {"vocab_size": VOCAB},
        "modelopt": sizes
        | {"medusa": {"num_medusa_heads": 3, "num_medusa_layers": 2}, "vocab_size": VOCAB},
        "vllm": sizes | vllm | {"vocab_size": VOCAB},
    }
    # What another config says of its own tensors must not get in.
    other = {"version": "2", "medusa": {}, "medusa_fc_bias": False, "head_type": "sequential"}
    other |= {"hidden_size": 99, "truncated_vocab_size": 2, "logit_scale": 7, "seed": 1}
    other |= {"base_model_name_or_path": "org/other", "medusa_num_heads": 7}
    for fmt in FORMATS:
        saved = make_weights(fmt)
        save_heads(tmp_path / fmt, fmt, **saved, base_model="org/target", config=other)
        assert config_of(tmp_path / fmt) == expected[fmt]
        info = inspect_heads(tmp_path / fmt)
        assert (info.base_model, info.logit_scale) == ("org/target", 1.0)


@pytest.mark.parametrize("fmt", FORMATS)
def test_logit_scale(tmp_path: Path, fmt: str) -> None:
    save_heads(tmp_path, fmt, **make_weights(fmt), logit_scale=0.5)
    assert inspect_heads(tmp_path).logit_scale == 0.5


def test_vllm_must_know_the_targets_vocabulary(tmp_path: Path) -> None:
    saved = make_weights("vllm", rows=3, token_map=[7, 0, 9])
    assert '"vocab_size"' in error_of(tmp_path / "heads", "vllm", saved)
    too_small = saved | {"config": {"vocab_size": 9}}
    assert '"vocab_size"' in error_of(tmp_path / "heads", "vllm", too_small)
    save_heads(tmp_path, "vllm", **saved, config={"vocab_size": 10})
    assert config_of(tmp_path)["truncated_vocab_size"] == 3


# What cannot be written


@pytest.mark.parametrize("fmt", ["medusa-1.0", "modelopt", "vllm"])
def test_formats_without_sequential_heads(tmp_path: Path, fmt: str) -> None:
    message = error_of(tmp_path / "heads", fmt, make_weights(fmt, sequential=True))
    assert "sequential" in message and message.endswith("can: medusa-v0.1")


def test_version_2_has_no_lm_heads(tmp_path: Path) -> None:
    message = error_of(tmp_path / "heads", "medusa-2", make_weights("vllm"))
    assert "LM heads of their own" in message
    assert message.endswith("can: medusa-v0.1, medusa-1.0, modelopt, vllm")


@pytest.mark.parametrize("fmt", OWN_LM_HEADS)
def test_other_formats_need_lm_heads(tmp_path: Path, fmt: str) -> None:
    message = error_of(tmp_path / "heads", fmt, make_weights("medusa-2"))
    assert "the target's LM head" in message and message.endswith("can: medusa-2")


def test_no_layers_and_no_lm_heads(tmp_path: Path) -> None:
    message = error_of(
        tmp_path / "heads", "medusa-2", make_weights("medusa-2", num_layers=0, bias=False)
    )
    assert "no layers" in message and message.endswith("can: none")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"block_weight": torch.zeros(3, HIDDEN, HIDDEN)}, "expected [K, L, hidden, hidden]"),
        ({"block_weight": torch.zeros(3, 2, HIDDEN, 9)}, "expected shape [3, 2, 8, 8], found [3,"),
        ({"block_bias": torch.zeros(3, HIDDEN)}, "block_bias: expected shape [3, 2, 8]"),
        ({"lm_head": torch.zeros(2, VOCAB, HIDDEN)}, "lm_head: expected shape [3, 12, 8]"),
        ({"lm_head": torch.zeros(VOCAB, HIDDEN)}, "lm_head: expected shape [3, 8, 8]"),
        ({"lm_head": torch.zeros(3, VOCAB, HIDDEN).half()}, "float16, torch.float32"),
        ({"block_bias": torch.zeros(3, 2, HIDDEN).int()}, "found torch.float32, torch.int32"),
        ({"path_weight": [torch.zeros(HIDDEN, HIDDEN)]}, "path_weight: 1 for 3 heads"),
        ({"path_weight": [torch.zeros(HIDDEN, HIDDEN)] * 3}, "of head 3: expected shape [8, 24]"),
        ({"token_map": torch.arange(13)}, "token_map: expected integers"),
        ({"token_map": torch.zeros(2)}, "token_map: expected integers"),
        ({"token_map": torch.zeros(0).int()}, "token_map: expected integers"),
        ({"logit_scale": 0.0}, "logit_scale must be above 0"),
    ],
)
def test_weights_that_disagree(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    saved = make_weights("medusa-v0.1") | change
    assert expected in error_of(tmp_path / "heads", "medusa-v0.1", saved)


def test_unknown_format(tmp_path: Path) -> None:
    message = error_of(tmp_path / "heads", "medusa-3", make_weights("medusa-2"))
    assert "'medusa-3'" in message and "medusa-v0.1, medusa-2" in message


# Whole or not at all


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """As a full disk: writing more into a file fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    with file_size_limit(1000):
        message = error_of(tmp_path / "heads", "vllm", make_weights("vllm"))
    assert "cannot be written" in message


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    saved = make_weights("vllm")
    save_heads(tmp_path, "vllm", **saved)
    with file_size_limit(1000), pytest.raises(HeadsError, match="cannot be written"):
        save_heads(tmp_path, "medusa-2", **make_weights("medusa-2"))
    assert_saved(tmp_path, "vllm", saved)


def test_other_files_of_a_folder_stay(tmp_path: Path) -> None:
    (tmp_path / "medusa_tree.json").write_text("[[0]]")
    save_heads(tmp_path, "vllm", **make_weights("vllm"))
    saved = make_weights("medusa-2")
    save_heads(tmp_path, "medusa-2", **saved)
    assert (tmp_path / "medusa_tree.json").read_text() == "[[0]]"
    (tmp_path / "medusa_tree.json").unlink()
    assert_saved(tmp_path, "medusa-2", saved)


def test_others_may_read_a_new_folder(tmp_path: Path) -> None:
    save_heads(tmp_path / "heads", "medusa-2", **make_weights("medusa-2"))
    (tmp_path / "plain").mkdir()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("heads", "plain")]
    assert modes[0] == modes[1]
