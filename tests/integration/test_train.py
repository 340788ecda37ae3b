"""``vllm-medusa train`` as a whole: a tiny target, real stages, heads that are served."""

import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer

from tests.integration.generation import generate, medusa, tokens
from tests.integration.tiny import add_tokenizer, make_model
from tests.integration.watch import watching
from vllm_medusa.calibration.ranks_file import read_ranks
from vllm_medusa.cli.main import main
from vllm_medusa.heads.checkpoint import inspect_heads, load_heads
from vllm_medusa.stage_process import run_stage
from vllm_medusa.training import run
from vllm_medusa.training.answers import ChatTemplate, read_answers

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
OPTIONS = ["--max-answer-tokens", "24", "--max-length", "200", "--mixed-precision", "no"]
OPTIONS += ["--validation", "0.3", "--batch-answers", "4", "--save-every", "3", "--heads", "3"]
OPTIONS += ["--learning-rate", "1e-2", "--draft-vocab", "200", "--epochs", "3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_tokenizer(make_model(tmp_path_factory.mktemp("target") / "model"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    lines = [{"prompt": f"Question {number}: what is {number} + {number}?"} for number in range(16)]
    asked = [("user", "a"), ("assistant", "b"), ("user", "c")]
    lines[3] = {"messages": [{"role": role, "content": text} for role, text in asked]}
    lines[4] = {"conversations": [{"from": "human", "value": "d"}, {"from": "gpt", "value": "e"}]}
    text = [json.dumps(line) for line in lines]
    text.insert(2, '{"prompt": 7}')
    (folder / "data.jsonl").write_text("\n".join(text) + "\n")
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder


def command(model, data, output, *more):
    return [
        "train", str(model), "--data", str(data / "data.jsonl"), "--output", str(output),
        "--chat-template", str(data / "template.jinja"), *OPTIONS, *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(model, data, tmp_path_factory):
    output = tmp_path_factory.mktemp("trained") / "heads"
    assert main(command(model, data, output)) == 0
    return output


def test_heads_card_and_ranks_are_written(trained, model):
    info = inspect_heads(trained)
    assert info.warnings == ()
    assert (info.num_heads, info.is_sequential, info.draft_vocab_size) == (3, True, 200)
    answers = read_answers(trained.with_name("heads.work") / "answers.jsonl")
    assert len(answers) == 16
    assert {answer.line for answer in answers} == set(range(1, 18)) - {3}
    assert {answer.temperature for answer in answers} == {0.0, 1.0}
    paths = read_ranks(trained)
    assert all(path.shape[1] == 3 for path in paths)
    card = (trained / "README.md").read_text()
    assert f"{sum(len(answer.answer) for answer in answers)} tokens" in card
    assert (trained / "accuracy.png").stat().st_size > 10_000
    assert load_heads(trained).path_weight[2].abs().sum() > 0


def test_trained_heads_are_served_and_leave_the_text_as_it_is(trained, model, module_engine):
    template = ChatTemplate(AutoTokenizer.from_pretrained(model), TEMPLATE, str(model))
    prompts = [template.prompt([{"role": "user", "content": f"Question {n}"}]) for n in range(8)]
    tree = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
    plain = tokens(generate(module_engine(model), prompts))
    speculating = module_engine(model, **medusa(trained, tree))
    with watching() as watch:
        assert tokens(generate(speculating, prompts)) == plain
    assert any(length > 0 for length in watch.lengths)


def test_the_same_command_does_nothing_twice(trained, model, data, capsys):
    before = (trained / "medusa_lm_head.safetensors").read_bytes()
    assert main(command(model, data, trained)) == 0
    assert (trained / "medusa_lm_head.safetensors").read_bytes() == before


def test_a_run_that_was_killed_ends_with_the_same_heads(
    trained, model, data, tmp_path, monkeypatch
):
    """Killed in every stage: while answering, between shards, between checkpoints."""
    output = tmp_path / "heads"
    work = tmp_path / "heads.work"

    def interrupted(stage, after):
        """Stop behind so many reports of a stage."""

        def stop(function, *arguments, **options):
            for number, value in enumerate(run_stage(function, *arguments, **options)):
                if function.__name__ == stage and number >= after:
                    raise KeyboardInterrupt
                yield value

        return stop

    for stage, after in ("generate_answers", 5), ("compute_states", 1), ("train", 6):
        monkeypatch.setattr(run, "run_stage", interrupted(stage, after))
        assert main(command(model, data, output)) == 130, stage
        if stage == "generate_answers":  # killed in the middle of a line
            with (work / "answers.jsonl").open("a") as file:
                file.write('{"line": 9, "turn": 0, "pro')
    assert list((work / "training").glob("step-*"))
    monkeypatch.setattr(run, "run_stage", run_stage)
    assert main(command(model, data, output)) == 0
    first = load_heads(trained)
    second = load_heads(output)
    assert torch.equal(first.block_weight, second.block_weight)
    assert all(map(torch.equal, first.path_weight, second.path_weight))
    # The best heads may be those of the first epoch: the later ones must be the same too.
    undisturbed = trained.with_name("heads.work")
    logs = [(folder / "training" / "log.jsonl").read_text() for folder in (work, undisturbed)]
    assert logs[0] == logs[1]
    assert logs[0].count("\n") == 3


@pytest.mark.parametrize("options", [["--head-type", "plain", "--layers", "2"], ["--own-lm-heads"]])
def test_other_kinds_of_heads(options, model, data, trained, tmp_path):
    output = tmp_path / "heads"
    work = tmp_path / "heads.work"
    shutil.copytree(trained.with_name("heads.work"), work)
    shutil.rmtree(work / "training")
    assert main(command(model, data, output, "--retrain", "--distill", "0.5", *options)) == 0
    info = inspect_heads(output)
    assert info.warnings == ()
    plain = "plain" in options
    assert (info.is_sequential, info.num_layers) == (not plain, 2 if plain else 1)
    assert info.format == ("medusa-2" if plain else "medusa-v0.1")


def test_heads_are_trained_further_with_more_layers(model, data, trained, tmp_path):
    output, work = tmp_path / "heads", tmp_path / "heads.work"
    shutil.copytree(trained.with_name("heads.work"), work)
    shutil.rmtree(work / "training")
    more = ["--retrain", "--init", str(trained), "--layers", "2", "--learning-rate", "0"]
    assert main(command(model, data, output, *more)) == 0
    # Nothing learnt: a block of zeros more leaves everything as it was.
    assert inspect_heads(output).num_layers == 2
    for first, second in zip(read_ranks(trained), read_ranks(output), strict=True):
        assert (first == second).mean() > 0.99


def test_dry_run_touches_everything(model, data, tmp_path):
    assert main(command(model, data, tmp_path / "heads", "--dry-run")) == 0
    assert not (tmp_path / "heads").exists()
    inspect_heads(tmp_path / "heads.dry-run")
    assert (tmp_path / "heads.dry-run" / "README.md").exists()


def test_given_answers_are_used(model, data, tmp_path):
    arguments = command(model, data, tmp_path / "heads", "--no-regenerate", "--max-turns", "2")
    assert main(arguments) == 0
    answers = read_answers(tmp_path / "heads.work" / "answers.jsonl")
    assert [(answer.line, answer.turn) for answer in answers] == [(5, 0), (6, 0)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert [tokenizer.decode(answer.answer) for answer in answers] == ["<s>b</s>", "<s>e</s>"]
    # Nobody was asked, so nobody answered greedily.
    assert "greedy" not in (tmp_path / "heads" / "README.md").read_text()


def test_run_yaml_repeats_the_run(trained, model, data, tmp_path):
    again = tmp_path / "again"
    arguments = ["train", str(model), "--data", str(data / "data.jsonl"), "--output", str(again)]
    arguments += ["--config", str(trained / "run.yaml")]
    assert str(model.parent) not in (trained / "run.yaml").read_text()
    assert main(arguments) == 0
    first, second = load_heads(trained), load_heads(again)
    assert torch.equal(first.block_weight, second.block_weight)


def test_run_yaml_repeats_a_run_that_started_from_heads(trained, model, data, tmp_path, capsys):
    first, again = tmp_path / "first", tmp_path / "again"
    for output in (first, again):
        shutil.copytree(trained.with_name("heads.work"), output.with_name(f"{output.name}.work"))
        shutil.rmtree(output.with_name(f"{output.name}.work") / "training")
    more = ["--retrain", "--init", str(trained), "--layers", "2", "--epochs", "1"]
    assert main(command(model, data, first, *more)) == 0
    assert (first / "init.run.yaml").read_text() == (trained / "run.yaml").read_text()
    card = (first / "README.md").read_text()
    assert "started from heads, made as these, but for layers 1, epochs 3 (`init.run.yaml`)" in card
    assert str(trained.parent) not in (first / "run.yaml").read_text() + card

    repeat = ["train", str(model), "--data", str(data / "data.jsonl"), "--output", str(again)]
    repeat += ["--config", str(first / "run.yaml"), "--retrain"]
    assert main(repeat) == 1
    assert "started from heads of its own, heads: give them with --init" in capsys.readouterr().err
    repeat += ["--init", str(trained)]
    assert main(repeat) == 0
    assert torch.equal(load_heads(first).block_weight, load_heads(again).block_weight)
    assert inspect_heads(again).num_layers == 2
    # What is given wins over the file, also where it is the default.
    repeat.remove("--retrain")
    assert main([*repeat, "--epochs", "4"]) == 1
    assert "epochs: 1 then, 4 now" in capsys.readouterr().err


def test_other_settings_are_refused_and_named(trained, model, data, capsys):
    assert main(command(model, data, trained, "--max-answer-tokens", "25")) == 1
    error = capsys.readouterr().err
    assert "max_answer_tokens: 24 then, 25 now" in error
    assert main(command(model, data, trained, "--epochs", "1")) == 1
    assert "--retrain" in capsys.readouterr().err
