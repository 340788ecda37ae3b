"""The target's answers, from an engine that finishes them in an order of its own."""

import json
import random
from types import SimpleNamespace

import pytest

from vllm_medusa.training.answers import AnswerOptions, generate_answers, read_answers
from vllm_medusa.training.data import Conversation

MOST_AT_ONCE = 4


class Killed(Exception):
    pass


class Engine:
    """Answers "<line>-<turn>" with as many tokens as the name says, after as many steps as a
    generator says."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.left = {}
        scheduler = SimpleNamespace(max_num_seqs=MOST_AT_ONCE)
        self.vllm_config = SimpleNamespace(scheduler_config=scheduler)

    def add_request(self, name, prompt, sampling):
        assert len(self.left) < MOST_AT_ONCE
        self.left[name] = self.random.randint(1, 9)

    def step(self):
        self.left = {name: left - 1 for name, left in self.left.items()}
        names = [name for name, left in self.left.items() if left == 0]
        for name in names:
            del self.left[name]
            line, turn = map(int, name.split("-"))
            tokens = [line] * (1 + (7 * line + turn) % 5)
            yield SimpleNamespace(
                finished=True, request_id=name, outputs=[SimpleNamespace(token_ids=tokens)]
            )


class Tokenizer:
    chat_template = "a template"

    def apply_chat_template(self, messages, **options):
        return [1] * len(messages)

    def decode(self, token_ids, **options):
        return " ".join(map(str, token_ids))


def conversations(turns):
    message = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    return [Conversation(line, list(message) * turns) for line in range(1, 41)]


def answers(path, options, seed, monkeypatch, turns=1, kill_after=None):
    """All answers in the end; killed after some, and then again without."""
    engine = Engine(seed)
    llm = SimpleNamespace(llm_engine=engine, get_tokenizer=Tokenizer)
    monkeypatch.setattr("vllm.LLM", lambda model, **engine_options: llm)
    reports = []

    def report(value):
        reports.append(value)
        if kill_after is not None and len(reports) > kill_after:
            raise Killed

    arguments = ("model", {}, conversations(turns), None, path, options)
    try:
        generate_answers(report, *arguments)
    except Killed:
        return answers(path, options, seed + 1, monkeypatch, turns)
    return [(each.line, each.turn, len(each.answer)) for each in read_answers(path)]


@pytest.mark.parametrize("turns", [1, 2])
def test_killed_or_not_the_first_answers_that_are_enough_are_kept(turns, tmp_path, monkeypatch):
    options = AnswerOptions(num_tokens=50, max_turns=turns, temperatures=(0.0,))
    whole = answers(tmp_path / "whole", options, 0, monkeypatch, turns)
    assert sum(length for *_, length in whole) >= 50
    assert sum(length for *_, length in whole[:-1]) < 50
    every = [(line, turn) for line in range(1, 41) for turn in range(turns)]
    assert [(line, turn) for line, turn, _ in whole] == every[: len(whole)]
    for kill_after in range(1, len(whole) + 6):
        path = tmp_path / f"killed {kill_after}"
        found = answers(path, options, kill_after, monkeypatch, turns, kill_after)
        assert found == whole
    # The file holds no more than that.
    assert len(path.read_text().splitlines()) == len(whole)
    assert all(json.loads(line)["line"] <= whole[-1][0] for line in path.open())


def test_no_more_is_begun_than_runs_at_once(tmp_path, monkeypatch):
    options = AnswerOptions(num_tokens=10, temperatures=(0.0,))
    begun = []
    add_request = Engine.add_request

    def counted(self, name, *rest):
        begun.append(name)
        add_request(self, name, *rest)

    monkeypatch.setattr(Engine, "add_request", counted)
    kept = answers(tmp_path / "file", options, 0, monkeypatch)
    assert len(kept) <= len(begun) < 40


def test_without_a_number_of_tokens_all_are_answered(tmp_path, monkeypatch):
    options = AnswerOptions(temperatures=(0.0,))
    assert len(answers(tmp_path / "file", options, 0, monkeypatch, kill_after=7)) == 40
