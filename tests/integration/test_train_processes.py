"""``vllm-medusa train`` in two processes, as ``torchrun`` starts them."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from tests.integration.test_train import TEMPLATE, model  # noqa: F401
from vllm_medusa.cli.main import main
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.stage_process import run_stage
from vllm_medusa.training.answers import Answer
from vllm_medusa.training.batches import is_held_out

OPTIONS = ["--no-regenerate", "--max-length", "200", "--mixed-precision", "no", "--heads", "2"]
OPTIONS += ["--validation", "0.3", "--learning-rate", "1e-2", "--draft-vocab", "200"]
OPTIONS += ["--batch-answers", "4", "--epochs", "3"]
STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Answers of one length, 8 of them to train on: two whole steps an epoch."""
    folder = tmp_path_factory.mktemp("data")
    lines, training = [], 0
    while training < 8:
        number = len(lines) + 1
        training += not is_held_out(Answer(number, 0, [], [], 0.0), 0.3)
        asked = {"role": "user", "content": f"Question {number}"}
        answered = {"role": "assistant", "content": f"{number:02d}" * 10}
        lines.append(json.dumps({"messages": [asked, answered]}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder


def command(model, data, output, *more):  # noqa: F811
    return [
        "train", str(model), "--data", str(data / "data.jsonl"), "--output", str(output),
        "--chat-template", str(data / "template.jinja"), *OPTIONS, *more,
    ]  # fmt: skip


def run_in_two_processes(arguments):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc_per_node", "2", "-m", "vllm_medusa.cli.main"]
    process = subprocess.Popen(
        [*launcher, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output, errors


def schedule_of(output):
    (last,) = (output.with_name("heads.work") / "training").glob("step-*")
    assert last.name == f"step-{STEPS}"
    (file,) = last.glob("custom_checkpoint_*.pkl")
    return torch.load(file)


def test_two_processes_end_with_the_heads_of_one(model, data, tmp_path):  # noqa: F811
    one, two = tmp_path / "one" / "heads", tmp_path / "two" / "heads"
    assert main(command(model, data, one)) == 0
    status, output, errors = run_in_two_processes(command(model, data, two))
    assert status == 0, errors
    # Answers, states and card were made once.
    assert output.count("hidden states ...") == 1
    assert output.count("heads, card and picture are in") == 1
    answers = [heads.with_name("heads.work") / "answers.jsonl" for heads in (one, two)]
    assert answers[0].read_text() == answers[1].read_text()
    # The learning rate is through its schedule at the last step, and not before.
    assert schedule_of(one)["last_epoch"] == schedule_of(two)["last_epoch"] == STEPS
    assert schedule_of(two)["_last_lr"] == pytest.approx([0.0])
    first, second = load_heads(one), load_heads(two)
    assert first.block_weight.abs().max() > 1e-3
    torch.testing.assert_close(first.block_weight, second.block_weight, rtol=1e-2, atol=1e-4)


def test_all_processes_end_where_the_first_one_fails(model, data, tmp_path):  # noqa: F811
    (tmp_path / "file").write_text("")
    status, _, errors = run_in_two_processes(command(model, data, tmp_path / "file" / "heads"))
    assert status == 1
    assert errors.count("(--output)") == 1


def test_a_step_must_be_shared_out_evenly(model, data, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main(command(model, data, tmp_path / "heads")) == 1
    assert "--batch-answers 4 cannot be shared out evenly to 3 processes" in capsys.readouterr().err


def report_launcher(report):
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    report([name for name in names if name in os.environ])


def test_an_engine_beside_the_processes_is_none_of_them(tmp_path, monkeypatch):
    """It would wait for the others, and with torchrun's store it would not even start."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert list(run_stage(report_launcher, log=tmp_path / "log")) == [[]]
    assert os.environ["WORLD_SIZE"] == "2"
