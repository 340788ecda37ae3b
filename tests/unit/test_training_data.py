"""Training data: three shapes of lines, and what is said of bad ones."""

import json

import pytest

from vllm_medusa.training.answers import Answer, AnswerOptions, ChatTemplate, read_answers
from vllm_medusa.training.batches import is_held_out
from vllm_medusa.training.data import DataError, read_conversations


def write(tmp_path, *lines):
    path = tmp_path / "data.jsonl"
    text = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("\n".join(text) + "\n")
    return path


def test_all_shapes_give_the_same_messages(tmp_path):
    asked = {"role": "user", "content": "why?"}
    answered = {"role": "assistant", "content": "so"}
    path = write(
        tmp_path,
        {"messages": [asked, answered]},
        "",
        {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so"}]},
        {"prompt": "why?"},
    )
    conversations, problems = read_conversations(path)
    assert [each.messages for each in conversations] == [[asked, answered]] * 2 + [[asked]]
    assert [each.line for each in conversations] == [1, 3, 4]
    assert problems == []


def test_turns_stand_before_answers(tmp_path):
    talk = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": role, "content": text} for role, text in talk]
    [conversation], _ = read_conversations(write(tmp_path, {"messages": messages}))
    assert list(conversation.turns()) == [(messages[:2], "b"), (messages, None)]


def test_an_answer_without_its_question_is_dropped(tmp_path):
    path = write(
        tmp_path,
        {"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]},
    )
    [conversation], _ = read_conversations(path)
    assert conversation.messages == [{"role": "user", "content": "y"}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting"),
        ("[1]", "expected an object, found list"),
        ({"text": "x"}, 'expected a key "messages", "conversations" or "prompt", found text'),
        ({"prompt": 3}, "no text: int"),
        ({"messages": "x"}, "not a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role is 'robot'"),
        ({"conversations": [{"from": "gpt", "value": "x"}]}, "no user message"),
        ({"prompt": "  "}, "no user message"),
        (b"\xff".decode("latin1") * 3, "Expecting"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, said):
    path = write(tmp_path, {"prompt": "good"}, line)
    conversations, [problem] = read_conversations(path)
    assert len(conversations) == 1
    assert f"{path}, line 2: " in problem
    assert said in problem


def test_too_many_bad_lines_are_an_error(tmp_path):
    path = write(tmp_path, {"prompt": "good"}, "{", "}", "]")
    assert len(read_conversations(path, max_bad_lines=3)[1]) == 3
    with pytest.raises(
        DataError, match=r"more than 2 malformed.*\n.*line 2.*\n.*line 3.*\n.*line 4"
    ):
        read_conversations(path, max_bad_lines=2)


def test_no_conversations_are_an_error(tmp_path):
    with pytest.raises(DataError, match="holds no conversations"):
        read_conversations(write(tmp_path, ""))
    with pytest.raises(DataError, match=r"cannot read the data .*No such file"):
        read_conversations(tmp_path / "missing.jsonl")


def test_a_line_cut_off_while_writing_is_removed(tmp_path):
    file = tmp_path / "answers.jsonl"
    answers = [Answer(7, 0, [1, 2], [3], 0.0), Answer(2, 1, [1], [4, 5], 1.0)]
    whole = "".join(json.dumps(vars(answer)) + "\n" for answer in answers)
    file.write_text(whole + '{"line": 3, "tu')
    assert read_answers(file) == [answers[1], answers[0]]
    assert file.read_text() == whole
    assert read_answers(tmp_path / "none.jsonl") == []


def test_a_model_without_a_chat_template_says_how_to_give_one():
    class Tokenizer:
        chat_template = None

    with pytest.raises(DataError, match="no chat template: give one with --chat-template"):
        ChatTemplate(Tokenizer(), None, "some-model")


def test_held_out_conversations_are_the_wanted_share_and_stay_the_same():
    answers = [Answer(line, 0, [1], [2], 0.0) for line in range(1, 4001)]
    held = [is_held_out(answer, 0.05) for answer in answers]
    assert 0.04 < sum(held) / len(held) < 0.06
    # Turns of one conversation are on the same side.
    assert held == [is_held_out(Answer(a.line, 1, [9], [9], 1.0), 0.05) for a in answers]


def test_answer_options_default_to_three_greedy_of_four():
    assert AnswerOptions().temperatures.count(0.0) == 3
