"""``vllm-medusa convert``: between all formats bit for bit, or a refusal that leaves nothing."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_medusa.cli.main import main
from vllm_medusa.heads import convert
from vllm_medusa.heads.checkpoint import HeadsError, HeadsWeights, load_heads
from vllm_medusa.heads.convert import convert_heads
from vllm_medusa.heads.formats import FORMATS
from vllm_medusa.heads.save import save_heads
from vllm_medusa.heads.target_lm_head import read_target_lm_head

HIDDEN, VOCAB, NUM_HEADS = 8, 12, 3
TOKENS = [7, 0, 9, 3]
OWN_LM_HEADS = tuple(fmt for fmt in FORMATS if fmt != "medusa-2")

# Keyword arguments of ``make_heads``.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "bfloat16": {"dtype": torch.bfloat16},
    "token map": {"token_map": TOKENS},
    "only rows of the token map": {"token_map": TOKENS, "rows": len(TOKENS)},
    "sequential": {"sequential": True},
    "no layers": {"num_layers": 0, "bias": False},
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_target(folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A target's checkpoint, cut down to two matrices."""
    folder.mkdir()
    weights = {"lm_head.weight": random(VOCAB, HIDDEN, seed=9).to(dtype)}
    weights["model.embed_tokens.weight"] = random(VOCAB, HIDDEN, seed=8).to(dtype)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return folder


def make_heads(
    folder: Path,
    fmt: str,
    *,
    num_layers: int = 2,
    bias: bool = True,
    sequential: bool = False,
    rows: int = VOCAB,
    token_map: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    targets: bool = False,
    **more: Any,
) -> Path:
    """Random heads; with ``targets`` their LM heads are copies of the target's."""
    heads: dict[str, Any] = {"block_weight": random(NUM_HEADS, num_layers, HIDDEN, HIDDEN, seed=1)}
    if num_layers:
        heads["block_weight"][0, 0, 0, :2] = torch.tensor([0.0, -0.0])
    if bias:
        heads["block_bias"] = random(NUM_HEADS, num_layers, HIDDEN, seed=2)
    if fmt != "medusa-2":
        heads["lm_head"] = random(NUM_HEADS, rows, HIDDEN, seed=3)
        if targets:
            lm_head = random(VOCAB, HIDDEN, seed=9)
            lm_head = lm_head if rows == VOCAB else lm_head[token_map]
            heads["lm_head"] = lm_head.expand(NUM_HEADS, -1, -1)
    heads = {name: tensor.to(dtype) for name, tensor in heads.items()}
    if sequential:
        heads["path_weight"] = [
            random(HIDDEN, number * HIDDEN, seed=4).to(dtype) for number in range(1, NUM_HEADS + 1)
        ]
    if token_map is not None:
        heads["token_map"] = torch.tensor(token_map)
    config = {"vocab_size": VOCAB, "trained_on": "answers"}
    more = {"base_model": "org/target", "logit_scale": 0.5, "config": config} | more
    save_heads(folder, fmt, **heads, **more)
    return folder


def assert_same(one: Path, other: Path) -> None:
    """All weights are equal; one LM head for all heads equals a copy for each."""
    a, b = load_heads(one, all_rows=True), load_heads(other, all_rows=True)
    assert a.info.warnings == b.info.warnings == ()
    for name in ("num_heads", "num_layers", "dtype", "logit_scale", "base_model", "is_sequential"):
        assert getattr(a.info, name) == getattr(b.info, name), name
    for name in ("block_weight", "block_bias", "path_weight", "lm_head", "token_map"):
        assert_equal(getattr(a, name), getattr(b, name), name)


def assert_equal(a: Any, b: Any, name: str) -> None:
    if a is None or b is None:
        assert a is b, name
    elif isinstance(a, list):
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other, name)
    else:
        if name == "lm_head":
            a, b = (each.expand(NUM_HEADS, -1, -1) for each in (a, b))
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        if a.is_floating_point():
            assert torch.equal(a.signbit(), b.signbit()), name


def holds(fmt: str, kind: str) -> bool:
    if kind == "sequential":
        return fmt in ("medusa-v0.1", "medusa-2")
    return not (kind == "no layers" and fmt == "medusa-2")


# Every format to every other


@pytest.mark.parametrize(
    ("fmt", "to", "kind"),
    [
        (fmt, to, kind)
        for fmt in OWN_LM_HEADS
        for to in OWN_LM_HEADS
        for kind in KINDS
        if holds(fmt, kind) and holds(to, kind)
    ],
)
def test_there_and_back(tmp_path: Path, fmt: str, to: str, kind: str) -> None:
    heads = make_heads(tmp_path / "in", fmt, **KINDS[kind])
    done = convert_heads(str(heads), tmp_path / "out", to)
    assert (done.source.format, done.result.format) == (fmt, to)
    assert done.notes == () and done.carried == ()
    assert_same(heads, tmp_path / "out")
    convert_heads(str(tmp_path / "out"), tmp_path / "back", fmt)
    files = [folder / "medusa_lm_head.safetensors" for folder in (heads, tmp_path / "back")]
    assert files[0].read_bytes() == files[1].read_bytes()
    texts = [(folder / "config.json").read_text() for folder in (heads, tmp_path / "back")]
    assert json.loads(texts[0]) == json.loads(texts[1])
    assert json.loads(texts[0])["trained_on"] == "answers"


@pytest.mark.parametrize(
    ("fmt", "kind"),
    [
        (fmt, kind)
        for fmt in OWN_LM_HEADS
        for kind in KINDS
        if holds(fmt, kind) and holds("medusa-2", kind)
    ],
)
def test_to_version_2_and_back(tmp_path: Path, fmt: str, kind: str) -> None:
    dtype = KINDS[kind].get("dtype", torch.float32)
    target = str(make_target(tmp_path / "target", dtype))
    heads = make_heads(tmp_path / "in", fmt, targets=True, **KINDS[kind])
    done = convert_heads(str(heads), tmp_path / "out", "medusa-2", target=target)
    assert done.notes == ("the LM heads, all equal to the target's, were left out",)
    assert_same(make_heads(tmp_path / "expected", "medusa-2", **KINDS[kind]), tmp_path / "out")

    done = convert_heads(str(tmp_path / "out"), tmp_path / "back", fmt, target=target)
    assert done.notes == ("the target's LM head was written into the heads",)
    assert done.result.shared_lm_head == (fmt == "vllm")
    if kind == "only rows of the token map":  # all rows were written
        whole = {"targets": True, "token_map": TOKENS}
        heads = make_heads(tmp_path / "whole", fmt, **whole)
    assert_same(heads, tmp_path / "back")


def test_version_2_stays_version_2(tmp_path: Path) -> None:
    heads = make_heads(tmp_path / "in", "medusa-2", sequential=True, token_map=TOKENS)
    assert convert_heads(str(heads), tmp_path / "out", "medusa-2").notes == ()
    assert_same(heads, tmp_path / "out")


@pytest.mark.parametrize("to", OWN_LM_HEADS)
def test_one_lm_head_for_all_becomes_copies(tmp_path: Path, to: str) -> None:
    target = str(make_target(tmp_path / "target"))
    make_heads(tmp_path / "2", "medusa-2")
    convert_heads(str(tmp_path / "2"), tmp_path / "in", "vllm", target=target)
    assert load_heads(tmp_path / "in").info.shared_lm_head
    convert_heads(str(tmp_path / "in"), tmp_path / "out", to)
    assert_same(tmp_path / "in", tmp_path / "out")
    lm_head = load_heads(tmp_path / "out").lm_head
    assert lm_head is not None and len(lm_head) == (1 if to == "vllm" else NUM_HEADS)


def test_nothing_of_a_target_is_copied(tmp_path: Path) -> None:
    heads = make_heads(tmp_path / "in", "medusa-1.0")
    tensors = load_file(heads / "medusa_lm_head.safetensors")
    (heads / "medusa_lm_head.safetensors").unlink()
    target = {"lm_head.weight": random(VOCAB, HIDDEN), "model.norm.weight": random(HIDDEN)}
    save_file(tensors | target, heads / "model.safetensors")
    config = json.loads((heads / "config.json").read_text())
    config |= {"model_type": "llama", "num_hidden_layers": 32, "rope_theta": 10000.0}
    (heads / "config.json").write_text(json.dumps(config))
    for to in OWN_LM_HEADS:
        done = convert_heads(str(heads), tmp_path / to, to)
        assert "2 tensors of a target" in done.source.warnings[0]
        assert done.result.warnings == ()
        assert len(load_file(tmp_path / to / "medusa_lm_head.safetensors")) == len(tensors)
        written = json.loads((tmp_path / to / "config.json").read_text())
        assert not {"rope_theta", "trained_on"} & written.keys()
        assert written["vocab_size"] == VOCAB


def test_files_beside_the_heads_go_along(tmp_path: Path) -> None:
    heads = make_heads(tmp_path / "in", "medusa-v0.1")
    (heads / "medusa_tree.json").write_text("[[0]]")
    (heads / "README.md").write_text("# Heads")
    (heads / "optimizer.pt").write_text("")
    save_file({"ranks": torch.zeros(1, 3)}, heads / "medusa_ranks.safetensors")
    done = convert_heads(str(heads), tmp_path / "out", "vllm")
    assert done.carried == ("medusa_tree.json", "medusa_ranks.safetensors", "README.md")
    for name in done.carried:
        assert (tmp_path / "out" / name).read_bytes() == (heads / name).read_bytes()
    assert not (tmp_path / "out" / "optimizer.pt").exists()
    assert_same(heads, tmp_path / "out")


# Types


def test_narrower_type_is_said(tmp_path: Path) -> None:
    heads = make_heads(tmp_path / "in", "medusa-v0.1")
    done = convert_heads(str(heads), tmp_path / "out", "vllm", dtype=torch.bfloat16)
    assert done.notes == ("rounded from float32 to bfloat16",)
    expected, found = load_heads(heads, dtype=torch.bfloat16), load_heads(tmp_path / "out")
    assert found.info.dtype == torch.bfloat16
    assert torch.equal(found.block_weight, expected.block_weight)

    done = convert_heads(str(tmp_path / "out"), tmp_path / "wide", "modelopt", dtype=torch.float32)
    assert done.notes == ("widened from bfloat16 to float32",)


def test_values_too_large_for_the_type(tmp_path: Path) -> None:
    heads = make_heads(tmp_path / "in", "medusa-2")
    tensors = load_file(heads / "medusa_lm_head.safetensors")
    tensors["0.0.linear.bias"][0] = 1e9
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    message = refused(heads, tmp_path / "out", "medusa-2", dtype=torch.float16)
    assert "too large for torch.float16" in message


def test_target_of_a_wider_type_loses_nothing(tmp_path: Path) -> None:
    target = str(make_target(tmp_path / "target"))
    heads = make_heads(tmp_path / "in", "medusa-2", dtype=torch.bfloat16)
    done = convert_heads(str(heads), tmp_path / "out", "vllm", target=target)
    assert done.notes[1:] == ("widened from bfloat16 to float32",)
    lm_head = load_heads(tmp_path / "out").lm_head
    assert lm_head is not None and torch.equal(lm_head[0], read_target_lm_head(target))


# Refusals


def refused(heads: Path, output: Path, to: str, **more: Any) -> str:
    """The message of a conversion that must fail and leave nothing."""
    before = sorted(output.parent.iterdir())
    with pytest.raises(HeadsError) as error:
        convert_heads(str(heads), output, to, **more)
    assert sorted(output.parent.iterdir()) == before
    return str(error.value)


@pytest.mark.parametrize("to", OWN_LM_HEADS)
def test_version_2_to_others_needs_the_target(tmp_path: Path, to: str) -> None:
    message = refused(make_heads(tmp_path / "in", "medusa-2"), tmp_path / "out", to)
    assert "--lm-head MODEL" in message and "target's LM head" in message


def test_lm_heads_are_not_dropped_unless_they_are_the_targets(tmp_path: Path) -> None:
    target = str(make_target(tmp_path / "target"))
    heads = make_heads(tmp_path / "in", "medusa-v0.1", targets=True)
    assert "--lm-head MODEL" in refused(heads, tmp_path / "out", "medusa-2")
    tensors = load_file(heads / "medusa_lm_head.safetensors")
    tensors["2.2.weight"][5, 5] = torch.nextafter(tensors["2.2.weight"][5, 5], torch.tensor(9.0))
    save_file(tensors, heads / "medusa_lm_head.safetensors")
    message = refused(heads, tmp_path / "out", "medusa-2", target=target)
    assert "the LM head of head 2 is not the target's" in message


@pytest.mark.parametrize("to", ["medusa-1.0", "modelopt", "vllm"])
def test_sequential_heads_fit_two_formats(tmp_path: Path, to: str) -> None:
    heads = make_heads(tmp_path / "in", "medusa-v0.1", sequential=True)
    assert "sequential" in refused(heads, tmp_path / "out", to)


def test_output_must_be_new(tmp_path: Path) -> None:
    heads = make_heads(tmp_path / "in", "medusa-v0.1")
    assert "not an empty folder" in refused(heads, heads, "vllm")
    (tmp_path / "file").write_text("")
    assert "not an empty folder" in refused(heads, tmp_path / "file", "vllm")
    (tmp_path / "empty").mkdir()
    convert_heads(str(heads), tmp_path / "empty", "vllm")
    assert_same(heads, tmp_path / "empty")


def test_target_must_fit(tmp_path: Path) -> None:
    heads = make_heads(tmp_path / "in", "medusa-2", token_map=[1, VOCAB])
    target = str(make_target(tmp_path / "target"))
    message = refused(heads, tmp_path / "out", "vllm", target=target)
    assert f"token id {VOCAB}" in message and target in message
    save_file({"lm_head.weight": random(VOCAB, 6)}, tmp_path / "target" / "model.safetensors")
    message = refused(heads, tmp_path / "out", "vllm", target=target)
    assert "hidden size 8 in the heads, 6 in the target" in message


def test_vllm_must_know_the_targets_vocabulary(tmp_path: Path) -> None:
    rows = {"rows": len(TOKENS), "token_map": TOKENS, "config": {}}
    heads = make_heads(tmp_path / "in", "medusa-v0.1", **rows)
    assert "vocab_size" in refused(heads, tmp_path / "out", "vllm")
    target = str(make_target(tmp_path / "target"))
    done = convert_heads(str(heads), tmp_path / "out", "vllm", target=target)
    assert done.notes == ("--lm-head told no more than the size of the vocabulary",)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == VOCAB
    assert_same(heads, tmp_path / "out")


@pytest.mark.parametrize("part", ["block_weight", "block_bias", "lm_head", "token_map"])
def test_a_single_wrong_bit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def save_wrongly(folder: Path, fmt: str, **weights: Any) -> None:
        wrong = weights[part].clone()
        if part == "block_weight":
            wrong[0, 0, 0, 0] = -0.0  # was 0
        else:
            wrong.view(torch.uint8)[..., -8] ^= 1
        save_heads(folder, fmt, **weights | {part: wrong})

    monkeypatch.setattr(convert, "save_heads", save_wrongly)
    heads = make_heads(tmp_path / "in", "medusa-v0.1", token_map=TOKENS)
    message = refused(heads, tmp_path / "out", "vllm")
    assert "differ" in message


def test_a_lost_tensor_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_less(folder: Path, fmt: str, **weights: Any) -> None:
        save_heads(folder, fmt, **weights | {"block_bias": None})

    monkeypatch.setattr(convert, "save_heads", save_less)
    message = refused(make_heads(tmp_path / "in", "vllm"), tmp_path / "out", "modelopt")
    assert "bias 1 of head 2" in message


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def copyfile(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    heads = make_heads(tmp_path / "in", "vllm")
    (heads / "README.md").write_text("# Heads")
    monkeypatch.setattr(convert.shutil, "copyfile", copyfile)
    assert "No space left" in refused(heads, tmp_path / "out", "modelopt")


# The target's LM head


def test_lm_head_of_a_target(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", torch.bfloat16)
    weights = load_file(target / "model.safetensors")
    assert torch.equal(read_target_lm_head(str(target)), weights["lm_head.weight"])
    (target / "config.json").write_text('{"tie_word_embeddings": true}')
    embedding = weights.pop("model.embed_tokens.weight")
    assert torch.equal(read_target_lm_head(str(target)), embedding)


def test_tied_target_in_shards(tmp_path: Path) -> None:
    embedding = random(VOCAB, HIDDEN)
    norm = {"model.norm.weight": random(HIDDEN)}
    save_file(norm, tmp_path / "model-00001-of-00002.safetensors")
    tied = {"model.embed_tokens.weight": embedding}
    save_file(tied, tmp_path / "model-00002-of-00002.safetensors")
    assert torch.equal(read_target_lm_head(str(tmp_path)), embedding)
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    with pytest.raises(HeadsError, match="no LM head among the 2 tensors"):
        read_target_lm_head(str(tmp_path))


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"x": torch.zeros(1)}, "no LM head among the 1 tensors"),
        ({"lm_head.weight": torch.zeros(2, 2), "lm_head.bias": torch.zeros(2)}, "lm_head.bias"),
        ({"lm_head.weight": torch.zeros(2, 2, dtype=torch.int8)}, "before it was quantised"),
        ({"lm_head.qweight": torch.zeros(2, 2, dtype=torch.int32)}, "lm_head.qweight"),
    ],
)
def test_targets_that_cannot_be_used(
    tmp_path: Path, tensors: dict[str, torch.Tensor], expected: str
) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(HeadsError, match=expected) as error:
        read_target_lm_head(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_damaged_target(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("damaged")
    with pytest.raises(HeadsError, match="cannot be read"):
        read_target_lm_head(str(tmp_path))


def test_only_the_shard_with_the_lm_head_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(tmp_path / "target")
    weight_map = {"lm_head.weight": "model.safetensors", "model.norm.weight": "other.safetensors"}
    index = json.dumps({"weight_map": weight_map})
    (target / "model.safetensors.index.json").write_text(index)
    calls = []

    def snapshot_download(repo: str, **arguments: Any) -> str:
        calls.append((repo, arguments["revision"], arguments["allow_patterns"]))
        if repo != "org/target":
            raise OSError("404\nno such repository")
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert read_target_lm_head("org/target@v1").shape == (VOCAB, HIDDEN)
    assert {call[:2] for call in calls} == {("org/target", "v1")}
    assert calls[-1][2][-1] == "model.safetensors" and "other.safetensors" not in calls[-1][2]
    with pytest.raises(HeadsError, match="404 no such repository"):
        read_target_lm_head("org/missing")


# The command


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = make_heads(tmp_path / "in", "medusa-2")
    (heads / "medusa_tree.json").write_text("[[0]]")
    target = str(make_target(tmp_path / "target"))
    out = str(tmp_path / "out")
    arguments = ["convert", str(heads), out, "--to", "medusa-v0.1"]
    assert main([*arguments, "--lm-head", target, "--dtype", "bfloat16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"{heads} (medusa-2) -> {out} (medusa-v0.1)",
        "the target's LM head was written into the heads",
        "rounded from float32 to bfloat16",
        "read back: all 15 tensors are the same bit for bit",
        "copied along: medusa_tree.json",
    ]
    assert main(arguments) == 1
    errors = capsys.readouterr()
    assert errors.out == "" and errors.err.startswith("vllm-medusa convert: ")


def test_warnings_about_the_source_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = make_heads(tmp_path / "in", "medusa-v0.1")
    (heads / "config.json").write_text('{"medusa_num_heads": 2}')
    assert main(["convert", str(heads), str(tmp_path / "out"), "--to", "vllm"]) == 0
    assert "medusa_num_heads 2, the tensors say 3" in capsys.readouterr().err
    weights: HeadsWeights = load_heads(tmp_path / "out")
    assert weights.info.num_heads == NUM_HEADS and weights.info.warnings == ()


def test_wrong_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--to", "medusa-3"], ["--to", "vllm", "--dtype", "int8"]):
        with pytest.raises(SystemExit) as end:
            main(["convert", str(tmp_path), str(tmp_path / "out"), *more])
        assert end.value.code == 2
    assert "medusa-v0.1" in capsys.readouterr().err


def test_needs_no_vllm() -> None:
    code = (
        "import sys, vllm_medusa.cli.convert; "
        "sys.exit(any(m in sys.modules for m in ('vllm', 'huggingface_hub', 'transformers')))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
