"""``vllm-medusa calibrate`` through a real engine, and serving with what it writes."""

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.integration.generation import (
    continuations,
    generate,
    make_prompts,
    medusa,
    runner_of,
    sampling_params,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import HIDDEN, VOCAB, add_tokenizer, make_heads, make_model
from tests.integration.watch import watching
from vllm_medusa.calibration import cost
from vllm_medusa.calibration import run as calibration
from vllm_medusa.calibration.cost import BatchCost, CostOptions, StepCost, _StepMeter
from vllm_medusa.calibration.cost_file import COSTS_FILE
from vllm_medusa.calibration.errors import CalibrationError
from vllm_medusa.calibration.live import set_tree_size
from vllm_medusa.calibration.ranks_file import MISS, save_ranks
from vllm_medusa.cli.main import main
from vllm_medusa.machine import these_versions, this_machine
from vllm_medusa.tree import TREE_FILE

NUM_HEADS = 3


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Where work files and compiled graphs go."""
    monkeypatch.setenv("VLLM_MEDUSA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def heads(tmp_path, cache):
    """Heads, and rank paths beside them that promise much."""
    folder = make_heads(tmp_path / "heads", NUM_HEADS)
    draws = np.random.default_rng(0).geometric(0.8, (20, 50, NUM_HEADS)) - 1
    paths = [np.where(path > 9, MISS, path).astype(np.uint8) for path in draws]
    for path in paths:
        for depth in range(NUM_HEADS):
            path[len(path) - depth :, depth] = MISS
    save_ranks(folder, paths)
    return folder


def calibrate(model, heads, *arguments):
    options = ["--eager", "--dtype", "float32", "--max-num-seqs", "2", "--nodes", "7"]
    return main(["calibrate", str(model), str(heads), *options, "--context", "20", *arguments])


def config_of(model, heads, **options):
    spec = {"method": "medusa", "model": str(heads), **options}
    args = EngineArgs(
        str(model), skip_tokenizer_init=True, max_model_len=128, speculative_config=spec
    )
    return args.create_engine_config().speculative_config


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_calibrate_goes_on_where_it_was_killed(models, heads, cache, monkeypatch, capsys):
    model, save = models(), calibration.save_costs

    def save_then_die(*args):
        save(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(calibration, "save_costs", save_then_die)
    assert calibrate(model, heads) == 130
    assert not (heads / TREE_FILE).exists()
    (work_file,) = cache.glob(f"calibration/*/{COSTS_FILE}")
    (first,) = json.loads(work_file.read_text())["costs"]
    monkeypatch.setattr(calibration, "save_costs", save)
    capsys.readouterr()
    assert calibrate(model, heads) == 0
    shown = capsys.readouterr().out
    assert "cost at batch size 1: measured before" in shown
    assert "at batch size 2: starting the engine" in shown
    assert "chosen" in shown and "vllm serve uses it by itself" in shown

    content = json.loads((heads / TREE_FILE).read_text())
    assert list(content["costs"]) == ["1", "2"]
    measured = {str(size["nodes"]): round(size["step"], 7) for size in first["sizes"]}
    assert content["costs"]["1"] == measured
    assert {"0", "1"} <= set(content["costs"]["2"])
    assert all(seconds > 0 for costs in content["costs"].values() for seconds in costs.values())
    for part in content["parts_of_a_step"]:
        step_ms = 1e3 * content["costs"][str(part["batch_size"])][str(part["nodes"])]
        assert 0 < part["forward_ms"] < step_ms
        assert (part["drafting_ms"] > 0.05) == (part["nodes"] > 0)
        assert part["steps"] == CostOptions().steps * CostOptions().rounds
    assert len(content["paths"]) == 7 and len(content["tokens_per_step"]) == 8
    assert content["machine"] == this_machine() and content["versions"] == these_versions()
    assert (content["dtype"], content["compiled"]) == ("float32", False)
    assert str(heads.parent) not in (heads / TREE_FILE).read_text()
    assert not work_file.exists()
    assert {path.name for path in heads.iterdir()} >= {"medusa_tree.png", TREE_FILE}
    assert not any(path.name.startswith(".") or path.is_dir() for path in heads.iterdir())

    spec = config_of(model, heads)
    schedule = content["num_speculative_tokens_per_batch_size"]
    assert [list(entry) for entry in spec.num_speculative_tokens_per_batch_size] == schedule
    assert spec.num_speculative_tokens == max(1, *(entry[2] for entry in schedule))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda heads: (heads / "medusa_ranks.safetensors").unlink(), "--data prompts.jsonl"),
        (
            lambda heads: save_ranks(heads, [np.zeros((4, 2), dtype=np.uint8)]),
            "is for [2] heads, the checkpoint holds 3",
        ),
        (
            lambda heads: make_heads(heads, NUM_HEADS, hidden_size=2 * HIDDEN),
            f"hidden size {2 * HIDDEN} in the heads, {HIDDEN} in the target",
        ),
    ],
)
def test_bad_input_is_refused_before_the_long_work(
    models, heads, change, words, monkeypatch, capsys
):
    monkeypatch.setattr(calibration, "run_stage", lambda *args, **kwargs: pytest.fail("started"))
    change(heads)
    assert calibrate(models(), heads) == 1
    assert words in capsys.readouterr().err


def test_no_such_model_or_output(models, heads, tmp_path, capsys):
    assert calibrate(tmp_path / "no-model", heads) == 1
    assert "no-model" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert calibrate(models(), heads, "--output", str(tmp_path / "file")) == 1
    assert "give another folder" in capsys.readouterr().err


def test_heads_of_the_hub_need_an_output(models, heads, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **kwargs: str(heads))
    assert calibrate(models(), "owner/heads") == 1
    assert "owner/heads is on the hub" in capsys.readouterr().err


def test_data_are_measured_anew(models, heads, tmp_path, cache, monkeypatch, capsys):
    """Without an engine: the ranks come from the data, the costs from the work file."""
    asked = []

    def measure_ranks(console, model, heads, data, work, max_prompts, **options):
        asked.append((model, heads, data, work.parent, max_prompts, options))
        return [np.full((4, NUM_HEADS), MISS, dtype=np.uint8)]

    module = SimpleNamespace(measure_ranks=measure_ranks)
    monkeypatch.setitem(sys.modules, "vllm_medusa.calibration.ranks", module)
    costs = [
        BatchCost(size, [StepCost(0, 1.0, 0.5, 0.0, 9), StepCost(1, 1.5, 0.5, 0.1, 9)], 0.0)
        for size in (1, 2)
    ]
    monkeypatch.setattr(calibration, "run_stage", lambda *args, **kwargs: iter([{}, *costs]))
    monkeypatch.setattr(calibration.contextlib, "closing", contextlib.nullcontext)
    output = tmp_path / "results"
    (tmp_path / "T").write_text("T")
    arguments = ["--data", "prompts.jsonl", "--max-prompts", "7", "--output", str(output)]
    arguments += ["--chat-template", str(tmp_path / "T")]
    assert calibrate(models(), heads, *arguments) == 0
    (call,) = asked
    assert call == (
        str(models()), heads, Path("prompts.jsonl"), cache / "calibration", 7,
        {"dtype": "float32", "chat_template": "T"},
    )  # fmt: skip
    content = json.loads((output / TREE_FILE).read_text())
    assert content["tokens_per_step"] == [1.0] * 8
    assert content["num_speculative_tokens"] == 0
    assert content["num_speculative_tokens_per_batch_size"] == [[1, 2, 0]]
    assert not (heads / TREE_FILE).exists()
    # What it says how to serve is what the configuration takes.
    said = capsys.readouterr().out
    options = json.loads(said.split("--speculative-config '")[1].split("'")[0])
    options.pop("method"), options.pop("model")
    assert config_of(models(), heads, **options).num_speculative_tokens == 1


def test_data_for_a_model_without_a_chat_template(heads, tmp_path, cache, monkeypatch, capsys):
    """Said before an engine is started, with an option that is there; bad lines are named."""
    monkeypatch.setattr(
        "vllm_medusa.training.run.run_stage", lambda *args, **kwargs: pytest.fail("started")
    )
    model = add_tokenizer(make_model(tmp_path / "model"))
    (tmp_path / "data.jsonl").write_text('{"prompt": 7}\n{"prompt": "a"}\n')
    arguments = ["--data", str(tmp_path / "data.jsonl")]
    assert calibrate(model, heads, *arguments) == 1
    said = capsys.readouterr()
    assert "skipped: " in said.out and "line 1" in said.out
    assert "has no chat template: give one with --chat-template FILE" in said.err
    assert calibrate(model, heads, *arguments, "--chat-template", str(tmp_path / "none")) == 1
    assert "none cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--nodes", "128"], ["--nodes", "0"], ["--max-num-seqs", "-1"]]
)
def test_bad_numbers(models, heads, arguments):
    with pytest.raises(SystemExit) as end:
        calibrate(models(), heads, *arguments)
    assert end.value.code == 2


# -- measuring -------------------------------------------------------------------------------------


def test_a_turn_times_steps_of_the_size_asked_for(models, heads, engine, monkeypatch):
    monkeypatch.setattr(cost, "ROOM", 100)
    llm = engine(models(), **medusa(heads, None, num_speculative_tokens=15), max_num_seqs=4)
    with watching() as watch:
        meter = _StepMeter(llm, CostOptions(context=20, steps=4))
        for batch_size, nodes in [(1, 0), (1, 15), (1, 3), (4, 3), (4, 0), (4, 15)]:
            times = meter.turn(batch_size, nodes)
            assert len(times) == 4
            kind = {0: "decode", 15: "tree"}.get(nodes, "cut")
            assert watch.steps[-5:] == [Counter({kind: batch_size})] * 5
            for part in times:
                assert 0 < part["forward"] < part["step"]
                assert part["drafting"] < part["step"] - part["forward"]
        assert set(watch.num_nodes) == {3, 15}
        # Requests never reach their end within a turn; full ones are replaced.
        names = set(meter.lengths)
        for _ in range(100):
            meter.turn(4, 15)
            if not names & set(meter.lengths):
                break
        assert len(meter.lengths) == 4 and not names & set(meter.lengths)


def test_more_requests_than_the_engine_runs(models, heads, engine):
    llm = engine(models(), **medusa(heads, None, num_speculative_tokens=3), max_num_seqs=4)
    meter = _StepMeter(llm, CostOptions(context=20))
    with pytest.raises(CalibrationError, match="start 5 requests of 20 tokens"):
        meter.turn(5, 3)


# -- serving with it -------------------------------------------------------------------------------


def store(heads, **entries):
    paths = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
    (heads / TREE_FILE).write_text(json.dumps({"paths": paths, **entries}))


def test_the_stored_schedule_counts_where_nothing_else_is_said(models, heads):
    schedule = [[1, 2, 4], [3, 8, 2], [9, 9, 0]]
    store(heads, num_speculative_tokens=4, num_speculative_tokens_per_batch_size=schedule)

    def found(**options):
        spec = config_of(models(), heads, **options)
        entries = [list(entry) for entry in spec.num_speculative_tokens_per_batch_size]
        return spec.num_speculative_tokens, entries

    assert found() == (4, schedule)
    assert found(num_speculative_tokens=5) == (5, [[1, 1, 5]])
    assert found(tree=[[2], [0]]) == (2, [[1, 1, 2]])
    own = [[1, 4, 5], [5, 8, 1]]
    assert found(num_speculative_tokens_per_batch_size=own) == (5, own)
    with pytest.raises(ValueError, match="asks for 6 nodes at batch sizes 1 to 4"):
        found(num_speculative_tokens_per_batch_size=[[1, 4, 6]])
    # What does not fit is cut; where nothing pays there is no speculation.
    store(heads, num_speculative_tokens_per_batch_size=[[1, 2, 9], [3, 3, 0]])
    assert found() == (5, [[1, 2, 5], [3, 3, 0]])
    store(heads, num_speculative_tokens=0)
    assert found() == (1, [[1, 1, 0]])


def test_a_tree_from_elsewhere_is_used_with_one_warning(models, heads, monkeypatch):
    said = []
    monkeypatch.setattr(
        "vllm_medusa.config.logger.warning_once",
        lambda text, *values: said.append(text % values),
    )
    store(heads, machine=this_machine(), versions=these_versions())
    config_of(models(), heads)
    assert said == []
    store(heads, machine={"cpu": "another", "cores": 4096}, versions={"vllm": "0.1"})
    assert config_of(models(), heads).num_speculative_tokens == 5
    (warning,) = said
    for words in ("cpu another, here", "cores 4096, here", "vLLM 0.1, here", str(heads)):
        assert words in warning
    assert f"vllm-medusa calibrate {models()} {heads}" in warning
    # Said nothing of where the choice is the user's own.
    config_of(models(), heads, num_speculative_tokens=2)
    assert len(said) == 1


def test_a_bad_stored_schedule_is_named(models, heads):
    store(heads, num_speculative_tokens_per_batch_size=[[2, 3, 1]])
    with pytest.raises(ValueError, match="num_speculative_tokens_per_batch_size") as error:
        config_of(models(), heads)
    assert str(heads / TREE_FILE) in str(error.value)


def test_no_nodes_under_load_and_back(models, heads, engine, reference):
    """The batch grows and shrinks again, through 3, 1 and 0 nodes; the text does not change."""
    store(heads, num_speculative_tokens_per_batch_size=[[1, 1, 3], [2, 3, 1], [4, 64, 0]])
    prompts = make_prompts(7, VOCAB, seed=3)
    lengths = [120, 70, 30, 30, 30, 40, 20]
    arrivals = {0: [0], 10: [1], 16: [2], 22: [3, 4], 28: [5], 70: [6]}
    whole = tokens(reference(models(), prompts, max_tokens=120))
    options = {"method": "medusa", "model": str(heads), "lookup": False}
    llm = engine(models(), speculative_config=options)
    core, drafter = llm.llm_engine, runner_of(llm).drafter
    drafted = Counter()
    propose = drafter.propose

    def counted(*args):
        drafted[args[-1]] += 1
        return propose(*args)

    drafter.propose = counted
    said, step, served = {}, 0, []
    with watching() as watch, oracle_drafts(Oracle(continuations(prompts, whole), VOCAB)):
        while core.has_unfinished_requests() or step <= max(arrivals):
            for number in arrivals.get(step, []):
                params = sampling_params(max_tokens=lengths[number])
                core.add_request(str(number), {"prompt_token_ids": prompts[number]}, params)
            for output in core.step():
                said[int(output.request_id)] = list(output.outputs[0].token_ids)
            step += 1
    assert [said[number] for number in range(7)] == [
        text[:length] for text, length in zip(whole, lengths, strict=True)
    ]
    assert set(watch.num_nodes) == {3, 1} and set(drafted) == {3, 1}
    served = [sum(counts.values()) for counts in watch.steps]
    assert max(served) >= 5
    # Two steps after the batch reached 4 requests none is a tree, and nothing is drafted for them.
    plain = [
        counts
        for before, now, counts in zip(served, served[1:], watch.steps[1:], strict=False)
        if before >= 4 and now >= 4
    ]
    assert plain and not any(counts["tree"] or counts["cut"] for counts in plain)
    # Trees of both sizes came back when the batch had shrunk.
    last_plain = max(index for index, size in enumerate(served) if size >= 4)
    after = sum((Counter(counts) for counts in watch.steps[last_plain + 2 :]), Counter())
    assert after["tree"] and after["cut"]


def test_set_tree_size_on_a_running_engine(models, heads, engine):
    llm = engine(models(), **medusa(heads, None, num_speculative_tokens=7))
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    for size in (0, 5, 7, 2):
        set_tree_size(scheduler, size)
        with watching() as watch:
            generate(llm, make_prompts(3, VOCAB, seed=size), max_tokens=20)
        assert set(watch.num_nodes) == ({size} if size else set())
