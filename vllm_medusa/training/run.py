"""``vllm-medusa train`` from beginning to end: answers, hidden states, training, evaluation.

Everything lies in a work folder until the heads are done. Each stage leaves there what it has
finished, and ``settings.json`` says what the folder was begun with: the same command goes on,
another one is refused before it could mix two runs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_medusa.heads.checkpoint import inspect_heads
from vllm_medusa.stage_process import run_stage
from vllm_medusa.training.answers import (
    ANSWERS_FILE,
    Answer,
    AnswerOptions,
    ChatTemplate,
    generate_answers,
    read_answers,
    store_given_answers,
)
from vllm_medusa.training.data import Conversation, DataError, read_conversations
from vllm_medusa.training.model import HeadsSpec, check_start
from vllm_medusa.training.output import write_heads
from vllm_medusa.training.processes import is_first, num_processes, part, prepare_in_first
from vllm_medusa.training.progress import stage_progress
from vllm_medusa.training.states import STATES_FOLDER, compute_states, missing_shards
from vllm_medusa.training.trainer import TRAINING_FOLDER, TrainOptions, train
from vllm_medusa.whole_file import make_writable, write_whole

SETTINGS = "settings.json"
ANSWERS_DONE = "answers.done"

# glibc gives large blocks back to the system at once and takes them anew for every batch: half of
# the time of a training step on a CPU.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "68719476736"}


@dataclass(frozen=True)
class RunOptions:
    """A training run.

    Attributes:
        model: the target, a folder or a hub id.
        data: JSONL of conversations or prompts.
        output: folder of the heads.
        work: folder of what is kept between starts.
        dtype: in which the target answers and gives its hidden states, as ``vllm serve --dtype``.
        store_dtype: of the stored heads; "auto": the target's.
        max_num_seqs: sequences answered at once.
        max_bad_lines: of the data, skipped before it is an error.
        chat_template: a Jinja template, for a model without one.
        retrain: train anew with other settings on the answers and states that are there.
        note: for the model card.
    """

    model: str
    data: Path
    output: Path
    work: Path
    dtype: str = "auto"
    store_dtype: str = "auto"
    max_num_seqs: int = 128
    max_bad_lines: int = 10
    chat_template: str | None = None
    retrain: bool = False
    note: str | None = None
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    heads: HeadsSpec = field(default_factory=HeadsSpec)
    training: TrainOptions = field(default_factory=TrainOptions)

    def settings(self) -> dict[str, dict[str, Any]]:
        """What the results depend on, by stage."""
        answers = asdict(self.answers) | {
            "model": self.model,
            "data": hashlib.sha256(self.data.read_bytes()).hexdigest(),
            "chat_template": self.chat_template,
            "dtype": self.dtype,
        }
        return {"answers": answers, "training": asdict(self.heads) | asdict(self.training)}


def run_training(console: Console, options: RunOptions) -> Path:
    """Train heads; goes on where an earlier run of the same command was stopped.

    Returns:
        The folder of the heads.

    Raises:
        DataError: the data, the model or the folders cannot be used.
        StageError: a stage failed.
    """
    check_processes(options)
    if not is_first():
        console = Console(quiet=True)
    prepare_in_first(lambda: prepare(console, options))
    with stage_progress(console, "training", "steps") as progress:
        train_heads(options, lambda record: _show(console, progress, record))
    part()
    if is_first():
        write_heads(console, options)
    return options.output


def prepare(console: Console, options: RunOptions) -> None:
    """All that is done before training: checks, answers, states."""
    conversations = read_data(console, options.data, options.max_bad_lines)
    check_model(options)
    check_init(options)
    prepare_folder(options.output, "--output")
    prepare_folder(options.work, "--work")
    check_settings(console, options)

    answers = make_answers(console, options, conversations)
    make_states(console, options, len(answers))


def read_data(console: Console, path: Path, max_bad_lines: int) -> list[Conversation]:
    """The conversations of a file; says which of its lines are passed over.

    Raises:
        DataError: the data cannot be used.
    """
    conversations, problems = read_conversations(path, max_bad_lines)
    for problem in problems:
        console.print(f"skipped: {problem}", style="yellow", markup=False, soft_wrap=True)
    return conversations


def make_answers(
    console: Console, options: RunOptions, conversations: Sequence[Conversation]
) -> list[Answer]:
    """The first stage; what is there already is not made again. Returns all answers."""
    file, done = options.work / ANSWERS_FILE, options.work / ANSWERS_DONE
    if not done.exists():
        with stage_progress(console, "answers", "tokens") as progress:
            if options.answers.regenerate:
                for num_answers, num_tokens in answer_stage(options, conversations):
                    # Without a number of tokens to reach, it is the conversations that run out.
                    total = options.answers.num_tokens or round(
                        num_tokens / max(num_answers, 1) * len(conversations)
                    )
                    # More may be begun than is needed: what is finished first is not known before.
                    progress(min(num_tokens, total), total)
            else:
                store_given_answers(
                    conversations, options.model, options.chat_template, file, options.answers
                )
        done.touch()
    answers = read_answers(file)
    if not answers:
        raise DataError(
            f"no answers: all {len(conversations)} prompts of {options.data} are longer than "
            f"--max-length {options.answers.max_length} tokens"
        )
    num_tokens = sum(len(answer.answer) for answer in answers)
    console.print(f"{len(answers)} answers, {num_tokens} tokens", highlight=False)
    return answers


def answer_stage(
    options: RunOptions, conversations: Sequence[Conversation]
) -> Iterator[tuple[int, int]]:
    """Lets the target answer; yields (answers, tokens) so far."""
    return run_stage(
        generate_answers,
        options.model,
        engine_options(options),
        conversations,
        options.chat_template,
        options.work / ANSWERS_FILE,
        options.answers,
        log=options.work / "answers.log",
        environment={"VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4")},
    )


def make_states(console: Console, options: RunOptions, num_answers: int) -> None:
    """The second stage; shards that are there are not made again."""
    if not missing_shards(options.work / STATES_FOLDER, num_answers):
        return
    with stage_progress(console, "hidden states", "shards") as progress:
        stage = run_stage(
            compute_states,
            options.model,
            options.dtype,
            options.work / ANSWERS_FILE,
            options.work / STATES_FOLDER,
            log=options.work / "states.log",
            environment=KEEP_MEMORY,
        )
        for shards, total in stage:
            progress(shards, total)


def train_heads(options: RunOptions, report: Callable[[dict[str, Any]], None]) -> None:
    """The training stage, in a process of its own unless accelerate has started several."""
    arguments = (options.model, options.work, options.heads, options.training)
    if num_processes() > 1:
        train(report, *arguments)
        return
    stage = run_stage(train, *arguments, log=options.work / "training.log", environment=KEEP_MEMORY)
    for record in stage:
        report(record)


def engine_options(options: RunOptions) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for answering many prompts at once."""
    from vllm.platforms import current_platform

    chosen: dict[str, Any] = {
        "dtype": options.dtype,
        "max_model_len": options.answers.max_length,
        "max_num_seqs": options.max_num_seqs,
        # Large batches gain little from compilation, and it takes minutes.
        "enforce_eager": True,
    }
    if current_platform.is_cpu():
        # With chunked prefill, vLLM 0.32 fails on CPUs where a request has a seed.
        chosen |= {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, options.answers.max_length),
        }
    return chosen


def check_processes(options: RunOptions) -> None:
    """Refuse a number of processes that the answers of a step cannot be shared out to.

    Raises:
        DataError: --batch-answers is no multiple of it.
    """
    if options.training.batch_answers % num_processes():
        raise DataError(
            f"--batch-answers {options.training.batch_answers} cannot be shared out evenly to "
            f"{num_processes()} processes: give a multiple of {num_processes()}"
        )


def check_model(options: RunOptions) -> None:
    """See that the model is there and can be asked, before an engine is started.

    Raises:
        DataError: it is not there whole, or has no chat template.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot load the model {options.model}: {error}\nGive a folder or a hub id; a "
            "download that was interrupted goes on when the command is run again"
        ) from error
    ChatTemplate(tokenizer, options.chat_template, options.model)


def check_init(options: RunOptions) -> None:
    """See that the heads to start from can be used, before hours are spent on answers.

    Raises:
        DataError: they are of another kind.
        HeadsError: there are none.
    """
    if options.training.init is None:
        return
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(options.model).get_text_config()
    check_start(inspect_heads(options.training.init), options.heads, text.hidden_size)


def prepare_folder(folder: Path, option: str) -> None:
    """Make a folder and see that it can be written, before hours are spent on what goes there."""
    try:
        make_writable(folder)
    except OSError as error:
        raise DataError(f"cannot write into {folder} ({option}): {error.strerror}") from error


def check_settings(console: Console, options: RunOptions) -> None:
    """Refuse to go on with a work folder that was begun with other settings.

    Raises:
        DataError: names each setting that differs, and both values.
    """
    file = options.work / SETTINGS
    # Through JSON, so that tuples compare as what was stored.
    wanted = json.loads(json.dumps(options.settings()))
    if file.exists():
        stored = json.loads(file.read_text())
        different = {stage: _differences(stored[stage], wanted[stage]) for stage in wanted}
        redo = f"give another --output (or --work), or delete {options.work} to begin anew"
        if different["answers"]:
            raise DataError(
                f"{options.work} was begun with other settings:{different['answers']}\n{redo}"
            )
        if different["training"]:
            if not options.retrain:
                raise DataError(
                    f"{options.work} was begun with other settings:{different['training']}\n"
                    f"give --retrain to train anew on the answers that are there, or {redo}"
                )
            kept = _keep_old_training(options.work)
            console.print(f"training anew; what was trained before is in {kept}", soft_wrap=True)
    write_whole(file, json.dumps(wanted, indent=1) + "\n")


def _differences(stored: dict[str, Any], wanted: dict[str, Any]) -> str:
    return "".join(
        f"\n  {name}: {stored.get(name)!r} then, {wanted.get(name)!r} now"
        for name in sorted(stored | wanted)
        if stored.get(name) != wanted.get(name)
    )


def _keep_old_training(work: Path) -> Path:
    number = 1
    while (kept := work / f"{TRAINING_FOLDER}-{number}").exists():
        number += 1
    if (work / TRAINING_FOLDER).exists():
        os.replace(work / TRAINING_FOLDER, kept)
    return kept


def _show(console: Console, progress: Callable[..., None], record: dict[str, Any]) -> None:
    progress(record["step"], record["steps"], f"loss {record['loss']:.3f}")
    if "tokens_per_step" in record:
        rates = ", ".join(f"{n}: {rate:.2f}" for n, rate in record["tokens_per_step"].items())
        top1 = ", ".join(f"{100 * share:.0f} %" for share in record["top1"])
        console.print(
            f"step {record['step']}: validation tokens per step by nodes {rates}; top-1 {top1}",
            highlight=False,
            soft_wrap=True,
        )
