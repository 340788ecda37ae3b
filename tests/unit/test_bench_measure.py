"""The paired measurement and the file of finished rounds, with engines that answer at once."""

import json
from typing import ClassVar

import pytest

from vllm_medusa.bench.engine import Engine
from vllm_medusa.bench.environment import memory_options
from vllm_medusa.bench.generation import Generation
from vllm_medusa.bench.measure import measure, running_engines, seconds_left
from vllm_medusa.bench.rounds import BenchError, Round, RoundFile, plan
from vllm_medusa.bench.variants import Variant
from vllm_medusa.demo.prompts import Prompt

SETTINGS = {"model": "tiny", "options": {"dtype": "float32"}}


class FakeEngine(Engine):
    """Notes who was asked for what; the load beside it follows a script."""

    asked: ClassVar[list[tuple[str, str, float]]] = []
    loads: ClassVar[list[float]] = []

    def generate(self, prompts, max_tokens, temperature=0.0, nodes=None):
        self.asked.append((self.variant.name, prompts[0].name, temperature))
        answers = [Generation([7] * max_tokens, [1, max_tokens], [1.0, 2.0]) for _ in prompts]
        return answers, {"step": 1.0}, self.loads.pop(0) if self.loads else 0.0


@pytest.fixture
def engines(monkeypatch):
    monkeypatch.setattr(FakeEngine, "asked", [])
    monkeypatch.setattr(FakeEngine, "loads", [])
    return [FakeEngine(Variant(name, None), model="") for name in "abc"]


@pytest.fixture
def file(tmp_path):
    return tmp_path / "rounds.jsonl"


def prompts(count, kind="chat"):
    return [Prompt(f"{kind} {number}", kind, "text") for number in range(count)]


def run(engines, tasks, file, settings=SETTINGS):
    done = RoundFile(file, settings)
    said = []
    measure(engines, tasks, 4, done, said.append)
    return done.rounds, said


def tasks(count):
    return plan({"chat": prompts(count)}, [0.0], [1])


def test_plan_lets_the_sets_take_turns():
    sets = {"chat": prompts(3), "code": prompts(2, "code")}
    planned = plan(sets, [0.0, 1.0], [1, 2])
    names = [[prompt.name for prompt in task.prompts] for task in planned]
    greedy = [["chat 0"], ["code 0"], ["chat 1"], ["code 1"], ["chat 2"]]
    assert names[:5] == names[5:10] == greedy
    assert [task.temperature for task in planned[:10]] == [0.0] * 5 + [1.0] * 5
    # A group of chat that would be short is left out.
    assert names[10:12] == names[12:] == [["chat 0", "chat 1"], ["code 0", "code 1"]]
    assert len({task.name for task in planned}) == len(planned)


def test_plan_asks_again_where_prompts_are_too_few():
    [task] = plan({"chat": prompts(2)}, [0.0], [5])
    assert [prompt.name[-1] for prompt in task.prompts] == list("01010")
    assert task.concurrency == 5


def test_the_order_rotates(engines, file):
    run(engines, tasks(3), file)
    assert "".join(name for name, *_ in FakeEngine.asked) == "abcbcacab"


def test_a_disturbed_round_is_repeated_and_the_calmest_kept(engines, file):
    FakeEngine.loads = [0.0, 0.9, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.05]
    rounds, _ = run(engines, tasks(4), file)
    assert len(FakeEngine.asked) == 3 * (4 + 2)
    # The order rotated by 0, so that the loads are those of a, b and c.
    assert rounds[0].others == [0.0, 0.0, 0.05]
    assert not rounds[0].disturbed


def test_a_busy_machine_does_not_hold_the_benchmark_up(engines, file):
    FakeEngine.loads = [1.0] * 1000
    rounds, _ = run(engines, tasks(10), file)
    # Each round three times at most, and half as many repetitions as tasks.
    asked = [prompt for name, prompt, _ in FakeEngine.asked if name == "a"]
    assert asked[:7] == ["chat 0"] * 3 + ["chat 1"] * 3 + ["chat 2"]
    assert len(asked) == 10 + 5
    assert all(each.disturbed for each in rounds)


def test_goes_on_where_it_was_stopped(engines, file):
    run(engines, tasks(2), file)
    with file.open("a") as lines:
        lines.write('{"task": "half a li')
    FakeEngine.asked.clear()
    rounds, said = run(engines, tasks(3), file)
    assert [prompt for _, prompt, _ in FakeEngine.asked] == ["chat 2"] * 3
    assert [each.task for each in rounds] == [task.name for task in tasks(3)]
    assert rounds[0].batches[2] == [Generation([7] * 4, [1, 4], [1.0, 2.0])]
    assert rounds[0].parts == [{"step": 1.0}] * 3
    assert RoundFile(file, SETTINGS).rounds == rounds
    assert "round 3 of 3 (about 0 s left)" in said[0]


def test_other_settings_are_refused(engines, file):
    run(engines, tasks(1), file)
    before = file.read_text()
    with pytest.raises(BenchError, match=r"other settings \(more, options\).*--output") as error:
        RoundFile(file, {"model": "tiny", "options": {"dtype": "auto"}, "more": 1})
    assert str(file) in str(error.value)
    assert file.read_text() == before


def test_a_file_stopped_before_its_first_line_was_whole(engines, file):
    file.write_text('{"model": "ti')
    run(engines, tasks(1), file)
    assert json.loads(file.read_text().splitlines()[0]) == SETTINGS


def test_time_left_is_estimated_from_rounds_alike():
    def done(size, seconds):
        batch = [Generation([7], [1], [1.0])] * size
        return Round("task", "chat", 0.0, [batch], [0.0], seconds)

    left = plan({"chat": prompts(2)}, [0.0], [1, 2])  # two of one prompt, one of two
    assert seconds_left(left, []) == "time left not known yet"
    assert seconds_left(left, [done(1, 5.0), done(2, 20.0)]) == "about 30 s left"
    assert seconds_left(left, [done(1, 60.0)]) == "about 3 min left"


@pytest.mark.parametrize("on_cuda", [False, True])
def test_engines_share_the_memory_of_a_gpu(on_cuda, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: on_cuda)
    monkeypatch.setattr(FakeEngine, "start", lambda self: None)
    monkeypatch.setattr("vllm_medusa.bench.measure.Engine", FakeEngine)
    variants = [Variant(name, None) for name in "abcde"]
    with running_engines(variants, "model", lambda text: None, dtype="auto") as engines:
        shares = [each.options.get("gpu_memory_utilization") for each in engines]
    assert shares == ([0.18] * 5 if on_cuda else [None] * 5)
    assert all(each.options["dtype"] == "auto" for each in engines)
    assert sum(memory_options(7, True)["gpu_memory_utilization"] for _ in range(7)) < 0.91
