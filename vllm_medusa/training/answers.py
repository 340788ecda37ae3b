"""First stage: the answers of the target itself (self-distillation, arXiv 2401.10774, 2.3.2).

Each answer is one line of ``answers.jsonl``, written when it is finished:

    {"line": 12, "turn": 0, "prompt": [token ids], "answer": [token ids], "temperature": 0.0}

``line`` is the conversation's line in the data. Later turns of a conversation see the target's own
earlier answers. What is in the file is never made again, so the stage can be killed at any moment.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from vllm_medusa.training.data import Conversation, DataError, Message
from vllm_medusa.whole_file import read_whole_lines, whole_file

ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True)
class Answer:
    """One answer, tokenised as the target read and wrote it."""

    line: int
    turn: int
    prompt: list[int]
    answer: list[int]
    temperature: float


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made.

    Attributes:
        temperatures: conversations take them in turn; 0 is greedy.
        max_answer_tokens: an answer is cut there.
        max_turns: of each conversation, the first so many user turns are answered.
        max_length: prompt and answer together; a longer prompt is passed over.
        num_tokens: enough answers to stop: the first of the data that have so many together; None
            answers all.
        regenerate: False takes the answers that the data holds.
    """

    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 1.0)
    max_answer_tokens: int = 256
    max_turns: int = 1
    max_length: int = 2048
    num_tokens: int | None = None
    regenerate: bool = True
    seed: int = 0


def read_answers(path: Path) -> list[Answer]:
    """The answers in the file, in the order of the data.

    A last line that was cut off while being written is removed from the file.
    """
    answers = [Answer(**json.loads(line)) for line in read_whole_lines(path)]
    return sorted(answers, key=lambda answer: (answer.line, answer.turn))


class ChatTemplate:
    """Turns messages into the token ids that the model's server would read."""

    def __init__(self, tokenizer: Any, template: str | None, model: str) -> None:
        if template is None and tokenizer.chat_template is None:
            raise DataError(
                f"the model {model} has no chat template: give one with --chat-template FILE "
                "(a Jinja file, as vllm serve --chat-template takes it)"
            )
        self.tokenizer = tokenizer
        self.template = template

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of the messages and of what stands before an answer."""
        return self._apply(messages, add_generation_prompt=True)

    def answer(self, messages: Sequence[Message], text: str, prompt: list[int]) -> list[int]:
        """Token ids of a given answer to the messages, up to its end-of-turn token."""
        whole = self._apply([*messages, {"role": "assistant", "content": text}])
        if whole[: len(prompt)] != prompt:
            raise DataError(
                "the chat template writes a finished turn differently from an open one, so the "
                "answers of the data cannot be told from the prompt: leave out --no-regenerate"
            )
        answer = whole[len(prompt) :]
        end = self.tokenizer.eos_token_id
        # Templates may put a line break behind the end of a turn, which the model never writes.
        return answer[: answer.index(end) + 1] if end in answer else answer

    def _apply(self, messages: Sequence[Message], **options: Any) -> list[int]:
        return self.tokenizer.apply_chat_template(
            list(messages), chat_template=self.template, return_dict=False, **options
        )


def take_answers(
    conversations: Sequence[Conversation], template: ChatTemplate, options: AnswerOptions
) -> Iterator[Answer]:
    """The answers that the data holds, without asking the target.

    Raises:
        DataError: it holds none.
    """
    found = False
    for conversation in conversations:
        turns = [turn for turn in conversation.turns() if turn[1] and turn[1].strip()]
        for number, (messages, text) in enumerate(turns[: options.max_turns]):
            assert text is not None
            prompt = template.prompt(messages)
            answer = template.answer(messages, text, prompt)[: options.max_answer_tokens]
            if len(prompt) + len(answer) <= options.max_length:
                found = True
                yield Answer(conversation.line, number, prompt, answer, 0.0)
    if not found:
        raise DataError(
            "the data has no assistant turns that could be used: leave out --no-regenerate to let "
            "the target answer"
        )


def store_given_answers(
    conversations: Sequence[Conversation],
    model: str,
    template_text: str | None,
    path: Path,
    options: AnswerOptions,
) -> None:
    """Write the answers that the data holds, whole or not at all."""
    from transformers import AutoTokenizer

    template = ChatTemplate(AutoTokenizer.from_pretrained(model), template_text, model)
    with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        num_tokens = 0
        for answer in take_answers(conversations, template, options):
            if options.num_tokens is not None and num_tokens >= options.num_tokens:
                break
            num_tokens += len(answer.answer)
            file.write(json.dumps(asdict(answer)) + "\n")


def generate_answers(
    report: Any,
    model: str,
    engine_options: dict[str, Any],
    conversations: Sequence[Conversation],
    template_text: str | None,
    path: Path,
    options: AnswerOptions,
) -> None:
    """Let the target answer; runs in a process of its own (``stage_process``).

    Reports (answers, tokens) in the file so far. Sequences beyond what the engine runs at once wait
    here, not in the engine, so that a stop leaves nothing behind.
    """
    from vllm import LLM

    llm = LLM(model, **engine_options)
    engine = llm.llm_engine
    template = ChatTemplate(llm.get_tokenizer(), template_text, model)
    most_at_once = engine.vllm_config.scheduler_config.max_num_seqs
    done: dict[int, list[Answer]] = {}
    for answer in read_answers(path):
        done.setdefault(answer.line, []).append(answer)
    num_answers = sum(map(len, done.values()))
    num_tokens = sum(len(answer.answer) for answers in done.values() for answer in answers)
    report((num_answers, num_tokens))
    # Tokens of the conversations up to the one that was begun last. All of them are finished, and
    # none is begun where those before it are enough: what there is in the end does not depend on
    # which answer came first, or on when the run was killed.
    begun_tokens = 0

    def requests() -> Iterator[_Request]:
        """First turns of all conversations that are not finished yet."""
        nonlocal begun_tokens
        for number, conversation in enumerate(conversations):
            if options.num_tokens is not None and begun_tokens >= options.num_tokens:
                return
            temperature = options.temperatures[number % len(options.temperatures)]
            request = _Request(conversation, temperature, done.get(conversation.line, []))
            begun_tokens += sum(len(answer.answer) for answer in request.answers)
            if request.is_open(options):
                yield request

    waiting = requests()
    running: dict[str, _Request] = {}
    with path.open("a", encoding="utf-8") as file:
        while True:
            while len(running) < most_at_once:
                request = next(waiting, None)
                if request is None:
                    break
                if request.start(engine, template, options):
                    running[request.name] = request
            if not running:
                break
            for output in engine.step():
                if not output.finished:
                    continue
                request = running.pop(output.request_id)
                answer = request.finish(list(output.outputs[0].token_ids))
                _append(file, answer, num_answers)
                num_answers, num_tokens = num_answers + 1, num_tokens + len(answer.answer)
                begun_tokens += len(answer.answer)
                report((num_answers, num_tokens))
                if request.is_open(options) and request.start(engine, template, options):
                    running[request.name] = request
    if options.num_tokens is not None:
        keep_enough(path, options.num_tokens)


def keep_enough(path: Path, num_tokens: int) -> None:
    """Leave in the file the first answers, in the order of the data, that have so many tokens
    together."""
    with whole_file(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        kept = 0
        for answer in read_answers(path):
            if kept >= num_tokens:
                break
            kept += len(answer.answer)
            file.write(json.dumps(asdict(answer)) + "\n")


def _append(file: TextIO, answer: Answer, num_answers: int) -> None:
    try:
        file.write(json.dumps(asdict(answer)) + "\n")
        file.flush()
    except OSError as error:
        raise OSError(
            f"cannot write {file.name} ({error.strerror}): make room and run the same command "
            f"again; the {num_answers} answers that are there are kept"
        ) from error


class _Request:
    """A conversation on its way through the engine, one turn at a time."""

    def __init__(
        self, conversation: Conversation, temperature: float, answers: Sequence[Answer]
    ) -> None:
        self.conversation = conversation
        self.temperature = temperature
        self.answers = list(answers)
        self.turns = [messages for messages, _ in conversation.turns()]

    @property
    def name(self) -> str:
        return f"{self.conversation.line}-{len(self.answers)}"

    def is_open(self, options: AnswerOptions) -> bool:
        return len(self.answers) < min(len(self.turns), options.max_turns)

    def start(self, engine: Any, template: ChatTemplate, options: AnswerOptions) -> bool:
        """Ask for the next answer; False where its prompt is too long."""
        from vllm import SamplingParams

        self.prompt = template.prompt(self._messages(template))
        room = options.max_length - len(self.prompt)
        if room < 2:
            return False
        sampling = SamplingParams(
            temperature=self.temperature,
            max_tokens=min(options.max_answer_tokens, room),
            # Of its own, so that an answer does not depend on what else is asked or asked again.
            seed=zlib.crc32(f"{options.seed} {self.name}".encode()) if self.temperature else None,
            detokenize=False,
        )
        engine.add_request(self.name, {"prompt_token_ids": self.prompt}, sampling)
        return True

    def finish(self, token_ids: list[int]) -> Answer:
        turn = len(self.answers)
        answer = Answer(self.conversation.line, turn, self.prompt, token_ids, self.temperature)
        self.answers.append(answer)
        return answer

    def _messages(self, template: ChatTemplate) -> list[Message]:
        """The next turn's messages, with the target's answers in place of the data's."""
        messages = list(self.turns[len(self.answers)])
        places = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        for place, answer in zip(places, self.answers, strict=False):
            text = template.tokenizer.decode(answer.answer, skip_special_tokens=True)
            messages[place] = {"role": "assistant", "content": text}
        return messages
