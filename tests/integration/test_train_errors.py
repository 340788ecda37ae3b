"""What ``vllm-medusa train`` says of bad input, and what it keeps."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.integration.test_train import command, data, model, trained  # noqa: F401
from tests.integration.tiny import make_heads
from vllm_medusa.cli.main import main
from vllm_medusa.stage_process import StageError, run_stage
from vllm_medusa.training import trainer
from vllm_medusa.training.memory import advise_on_memory
from vllm_medusa.training.model import HeadsSpec
from vllm_medusa.training.trainer import BEST, LossError, TrainOptions


def error_of(arguments, capsys):
    assert main(arguments) == 1
    return capsys.readouterr().err


def test_no_chat_template(model, data, tmp_path, capsys):  # noqa: F811
    arguments = command(model, data, tmp_path / "heads")
    place = arguments.index("--chat-template")
    del arguments[place : place + 2]
    error = error_of(arguments, capsys)
    assert "has no chat template: give one with --chat-template FILE" in error
    assert not (tmp_path / "heads").exists()


def test_no_such_model(data, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    error = error_of(command("no/such-model", data, tmp_path / "heads"), capsys)
    assert "cannot load the model no/such-model" in error
    assert "a download that was interrupted goes on" in error


def test_half_a_model(model, data, tmp_path, capsys):  # noqa: F811
    (tmp_path / "model").mkdir()
    config = (model / "config.json").read_text()
    (tmp_path / "model" / "config.json").write_text(config[: len(config) // 2])
    error = error_of(command(tmp_path / "model", data, tmp_path / "heads"), capsys)
    assert f"cannot load the model {tmp_path / 'model'}" in error


def test_no_assistant_turns(model, data, tmp_path, capsys):  # noqa: F811
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    arguments = command(model, data, tmp_path / "heads", "--no-regenerate")
    arguments[arguments.index("--data") + 1] = str(tmp_path / "data.jsonl")
    assert "no assistant turns that could be used" in error_of(arguments, capsys)


def test_too_few_answers_to_hold_one_out(model, data, tmp_path, capsys):  # noqa: F811
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    arguments = command(model, data, tmp_path / "heads", "--no-regenerate")
    arguments[arguments.index("--data") + 1] = str(tmp_path / "data.jsonl")
    assert "1 answers are too few to train and to validate on" in error_of(arguments, capsys)


def test_output_that_cannot_be_written(model, data, tmp_path, capsys):  # noqa: F811
    (tmp_path / "file").write_text("")
    error = error_of(command(model, data, tmp_path / "file" / "heads"), capsys)
    assert f"cannot write into {tmp_path / 'file' / 'heads'} (--output)" in error


def train_until_nan(trained, model, step, monkeypatch, save_every):  # noqa: F811
    """Train on the answers of another run, with a loss that is no number at a step."""
    work = trained.with_name("heads.work")
    options = TrainOptions(batch_answers=4, validation=0.3, epochs=2, save_every=save_every)
    loss_of, calls = trainer.head_loss, []

    def loss(*arguments, **more):
        calls.append(1)
        value = loss_of(*arguments, **more)
        return value * float("nan") if len(calls) == step else value

    monkeypatch.setattr(trainer, "head_loss", loss)
    folder = work.with_name(f"nan-{step}-{save_every}.work")
    folder.mkdir()
    for name in ("answers.jsonl", "states"):
        os.symlink(work / name, folder / name)
    spec = HeadsSpec(num_heads=3, draft_vocab=None)
    reports = []
    with pytest.raises(LossError) as error:
        trainer.train(reports.append, str(model), folder, spec, options)
    assert len(reports) >= step - 1
    assert all(torch.isfinite(torch.tensor(report["loss"])) for report in reports)
    assert f"the loss is nan at step {step} of " in str(error.value)
    return folder / "training", str(error.value)


def test_a_loss_that_is_no_number_keeps_the_best_heads(trained, model, monkeypatch):  # noqa: F811
    folder, error = train_until_nan(trained, model, 5, monkeypatch, save_every=1)
    assert str(folder / BEST) in error
    assert (folder / BEST).exists()


@pytest.mark.parametrize("save_every", [1, 200])
def test_a_loss_that_is_no_number_in_the_first_epoch(
    trained, model, monkeypatch, save_every  # noqa: F811
):  # fmt: skip
    folder, error = train_until_nan(trained, model, 2, monkeypatch, save_every)
    assert not (folder / BEST).exists() and BEST not in error
    if save_every == 1:
        assert f"the last checkpoint before it is {folder / 'step-1'}" in error
        assert (folder / "step-1").is_dir()
    else:
        assert "there is no checkpoint before it yet" in error


def test_too_little_memory_names_the_option():
    with (
        pytest.raises(
            ValueError, match=r"too little memory \(CUDA.*smaller --batch-answers than 9"
        ),
        advise_on_memory("--batch-answers", 9),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")


def test_a_full_disk_keeps_the_shards_that_are_there(tmp_path):
    """A real full disk: a file size limit in a process of its own."""
    script = (
        "import resource, sys, torch, signal; from pathlib import Path\n"
        "from vllm_medusa.training.states import save_shard\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "folder = Path(sys.argv[1])\n"
        "save_shard(folder / '00000.safetensors', torch.zeros(10, 10))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "save_shard(folder / '00001.safetensors', torch.zeros(100, 100))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "make room and run the same command again" in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["00000.safetensors"]


def test_bad_options_are_refused_at_once(model, data, tmp_path, capsys):  # noqa: F811
    for option, value, said in (
        ("--heads", "0", "--heads is 0: expected 1 or more"),
        ("--validation", "1.5", "--validation is 1.5: expected a share from 0 to 1"),
        ("--layers", "0", "needs a block to read the path with"),
    ):
        assert said in error_of(command(model, data, tmp_path / "h", option, value), capsys)
    (tmp_path / "run.yaml").write_text(json.dumps({"epoch": 3}))
    arguments = ["train", "--config", str(tmp_path / "run.yaml")]
    assert "unknown options: epoch" in error_of(arguments, capsys)
    assert "missing: MODEL --data --output" in error_of(["train"], capsys)


def test_heads_to_start_from_are_looked_at_first(model, data, tmp_path, capsys):  # noqa: F811
    start = make_heads(tmp_path / "start", 3)
    for init, said in (
        (tmp_path / "none", "no such folder"),
        (start, "cannot be a start for these: (sequential, number, hidden size) is (False, 3, 64)"),
    ):
        arguments = command(model, data, tmp_path / "heads", "--init", str(init))
        assert said in error_of(arguments, capsys)
    assert not (tmp_path / "heads.work" / "answers.jsonl").exists()


def out_of_memory(report):
    report(1)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")


def test_too_little_memory_in_any_stage(tmp_path):
    stage = run_stage(out_of_memory, log=tmp_path / "log")
    assert next(stage) == 1
    with pytest.raises(StageError, match="too little memory") as error:
        next(stage)
    assert "Tried to allocate 20 GiB" in str(error.value) and "more\n" not in str(error.value)
    assert "--max-num-seqs" in str(error.value)
    assert "Traceback" in (tmp_path / "log").read_text()
