"""Rank paths of stored heads on prompts: the target answers greedily, the heads are asked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from rich.console import Console

from vllm_medusa.calibration.ranks_file import RankPaths
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.training.answers import AnswerOptions
from vllm_medusa.training.evaluate import rank_paths
from vllm_medusa.training.model import TargetMatrices, TrainableHeads
from vllm_medusa.training.run import RunOptions, check_model, make_answers, make_states, read_data
from vllm_medusa.training.states import STATES_FOLDER, load_states


def measure_ranks(
    console: Console,
    model: str,
    heads: Path,
    data: Path,
    work: Path,
    max_prompts: int,
    dtype: str = "auto",
    max_answer_tokens: int = 128,
    chat_template: str | None = None,
) -> RankPaths:
    """How well heads foretell the target's greedy answers to prompts.

    Args:
        console: for progress.
        model: the target.
        heads: folder of the heads.
        data: JSONL of prompts that the heads were not trained on.
        work: folder of what is kept should this be stopped.
        max_prompts: the first so many are answered.
        dtype: of the target.
        max_answer_tokens: where answers are cut.
        chat_template: the text of a template, for a model without one.

    Raises:
        DataError: the data cannot be used.
        StageError: the target failed.
    """
    conversations = read_data(console, data, RunOptions.max_bad_lines)
    what = [model, dtype, max_prompts, max_answer_tokens, data.read_text(encoding="utf-8")]
    what += [chat_template] if chat_template else []
    digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:12]
    options = RunOptions(
        model=model,
        data=data,
        output=heads,
        work=work / f"ranks-{digest}",
        dtype=dtype,
        chat_template=chat_template,
        answers=AnswerOptions(temperatures=(0.0,), max_answer_tokens=max_answer_tokens),
    )
    check_model(options)
    options.work.mkdir(parents=True, exist_ok=True)
    answers = make_answers(console, options, conversations[:max_prompts])
    make_states(console, options, len(answers))
    states = load_states(options.work / STATES_FOLDER, answers)
    stored = load_heads(heads, dtype=torch.float32)
    trainable = TrainableHeads.from_weights(stored, TargetMatrices.read(model))
    items = [item for item in zip(states, answers, strict=True) if len(item[1].answer) > 1]
    return rank_paths(trainable, items)
