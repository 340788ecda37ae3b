"""Last stage: the best heads, how good they are, a card, a picture, and how to repeat it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console

from vllm_medusa import __version__
from vllm_medusa.calibration.ranks_file import RankPaths, save_ranks
from vllm_medusa.heads.checkpoint import inspect_heads, load_heads
from vllm_medusa.heads.save import save_heads
from vllm_medusa.picture import picture
from vllm_medusa.training.answers import ANSWERS_FILE, read_answers
from vllm_medusa.training.evaluate import accuracy_by_rank, expected_tokens, rank_paths
from vllm_medusa.training.model import TargetMatrices, TrainableHeads
from vllm_medusa.training.trainer import BEST, TRAINING_FOLDER, Split, load_heads_file, read_log

if TYPE_CHECKING:
    from vllm_medusa.training.run import RunOptions

CARD = "README.md"
PICTURE = "accuracy.png"
REPEAT = "run.yaml"
# What the files of the heads that training started from are called here.
START = "init."
TEMPLATE = "chat_template.jinja"
SIZES = (1, 3, 7, 15, 63)


def write_heads(console: Console, options: RunOptions) -> Path:
    """Evaluate the best checkpoint and write everything into the output folder."""
    import torch
    from transformers import AutoConfig

    target = TargetMatrices.read(options.model)
    best = load_heads_file(options.work / TRAINING_FOLDER / BEST, options.heads, target)
    name = name_of(options.model)
    dtype = options.store_dtype
    if dtype == "auto":
        dtype = str(AutoConfig.from_pretrained(options.model).dtype or torch.float32)
    save_heads(
        options.output,
        "medusa-v0.1" if options.heads.own_lm_heads else "medusa-2",
        base_model=name,
        config={"vocab_size": len(target.lm_head)} if options.heads.own_lm_heads else None,
        **best.weights(getattr(torch, dtype.removeprefix("torch."))),
    )
    # What is judged is what was stored, rounded as it is.
    heads = TrainableHeads.from_weights(load_heads(options.output, dtype=torch.float32), target)
    split = Split.read(options.work, options.training)
    items = split.validation[: options.training.max_validation]
    paths = rank_paths(heads, items)
    save_ranks(options.output, paths)
    start = keep_start(options)
    (options.output / REPEAT).write_text(yaml.safe_dump(command_options(options), sort_keys=False))
    if options.chat_template is not None:
        (options.output / TEMPLATE).write_text(options.chat_template, encoding="utf-8")
    num_ranks = heads.lm_head.shape[0]
    card = write_card(options, name, paths, num_ranks, len(items), start)
    (options.output / CARD).write_text(card, encoding="utf-8")
    draw_accuracy(paths, options.output / PICTURE)
    console.print(f"heads, card and picture are in {options.output}", soft_wrap=True)
    console.print(f"next: vllm-medusa calibrate {options.model} {options.output}", soft_wrap=True)
    return options.output


def command_options(options: RunOptions) -> dict[str, Any]:
    """The options of the command, as ``vllm-medusa train --config`` reads them. MODEL and --data
    are to be given again where they are local."""
    answers, heads, training = options.answers, options.heads, options.training
    # Of folders on this machine only the name: the card travels with the heads.
    init = options.training.init
    flat = {
        "model": name_of(options.model),
        "data": options.data.name,
        "dtype": options.dtype,
        "max_num_seqs": options.max_num_seqs,
        "store_dtype": options.store_dtype,
        "note": options.note,
        "max_bad_lines": options.max_bad_lines,
        "chat_template": None if options.chat_template is None else TEMPLATE,
        "temperatures": list(answers.temperatures),
        "max_answer_tokens": answers.max_answer_tokens,
        "max_turns": answers.max_turns,
        "max_length": answers.max_length,
        "tokens": answers.num_tokens,
        "no_regenerate": not answers.regenerate,
        "head_type": heads.head_type,
        "heads": heads.num_heads,
        "layers": heads.num_layers,
        "own_lm_heads": heads.own_lm_heads,
        "draft_vocab": heads.draft_vocab or 0,
    }
    return flat | asdict(training) | {"init": name_of(init) if init else None}


def keep_start(options: RunOptions) -> dict[str, Any]:
    """Copy how the heads were made that training started from, and what those started from.

    Returns:
        The options of the run that made them; none where nothing is known.
    """
    if options.training.init is None:
        return {}
    start = inspect_heads(options.training.init).path
    for file in sorted(start.glob(f"*{REPEAT}")):
        (options.output / f"{START}{file.name}").write_bytes(file.read_bytes())
    made = start / REPEAT
    return yaml.safe_load(made.read_text(encoding="utf-8")) if made.exists() else {}


def describe_start(options: RunOptions, start: dict[str, Any]) -> list[str]:
    """The card's line on the heads that training started from; none where it started from none."""
    if not options.training.init:
        return []
    line = f"- started from {name_of(options.training.init)}"
    if not start:
        return [f"{line}; how they were made is not known"]
    here = command_options(options)
    other = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in start.items()
        if name not in ("init", "note") and value != here.get(name)
    ]
    same = "as these" if not other else f"as these, but for {', '.join(other)}"
    return [f"{line}, made {same} (`{START}{REPEAT}`)"]


def name_of(given: str) -> str:
    """A hub id as it is, of a folder on this machine only the name: the card travels."""
    return Path(given).name if Path(given).exists() else given


def write_card(
    options: RunOptions,
    name: str,
    paths: RankPaths,
    num_ranks: int,
    num_answers: int,
    start: dict[str, Any],
) -> str:
    """The model card; ``start``: options of the run that made the heads it started from."""
    answers = read_answers(options.work / ANSWERS_FILE)
    tokens = sum(len(answer.answer) for answer in answers)
    prompts = len({answer.line for answer in answers})
    greedy = sum(answer.temperature == 0 for answer in answers) / len(answers)
    rates = expected_tokens(paths, SIZES, num_ranks)
    heads, training = options.heads, options.training
    log = read_log(options.work / TRAINING_FOLDER)
    last = log[-1]["step"] if log else 0
    lm_head = "own LM heads" if heads.own_lm_heads else "the target's LM head"
    vocab = "the whole vocabulary"
    if heads.draft_vocab and heads.draft_vocab <= num_ranks:
        vocab = f"the {num_ranks} most frequent tokens of the answers (`token_map`)"
    source, drawn = "that the data holds", ""
    if options.answers.regenerate:
        source = "of the target itself"
        drawn = (
            f"; {100 * greedy:.0f} % greedy, temperatures taken in turn "
            f"{list(options.answers.temperatures)}, seed {options.answers.seed}"
        )
    lines = [
        "---", f"base_model: {name}", "library_name: vllm", "tags: [medusa, vllm-medusa]", "---",
        "",
        f"# Medusa heads for {name}", "",
        f"{heads.num_heads} {heads.head_type} heads, {heads.num_layers} residual block(s) each, "
        f"{lm_head}, drafting from {vocab}. Made by vllm-medusa {__version__} "
        f"(`vllm-medusa train MODEL --data FILE --config {REPEAT}"
        f"{' --init HEADS' if training.init else ''}`).", "",
        "## Data", "",
        f"- {len(answers)} answers {source} to {prompts} prompts, {tokens} tokens{drawn}",
        f"- the target in {options.dtype}",
        *([f"- {options.note}"] if options.note else []),
        f"- {100 * training.validation:.0f} % of the conversations held out", "",
        "## Recipe", "",
        f"- AdamW, learning rate {training.learning_rate} after {100 * training.warmup:.0f} % "
        f"warm-up, cosine, weight decay {training.weight_decay}, gradients clipped at "
        f"{training.max_grad_norm}",
        *describe_start(options, start),
        f"- {training.epochs} epochs of {training.batch_answers} answers a step ({last} steps), "
        f"seed {training.seed}, products in "
        f"{'bfloat16' if training.mixed_precision == 'bf16' else 'float32'}",
        f"- cross-entropy weighted 0.8^k, {100 * training.distill:.0f} % of it against the "
        "target's probabilities", "",
        f"## Held-out text ({num_answers} answers)", "",
        "Share of positions at which the right token is among a head's first, in %, given that the "
        "path to it is right:", "",
        *accuracy_table(paths), "",
        "Tokens per step (replayed), each with the best tree of its size:", "",
        "| nodes | " + " | ".join(str(size) for size in rates) + " |",
        "|---|" + "---|" * len(rates),
        "| tokens per step | " + " | ".join(f"{rate:.2f}" for rate in rates.values()) + " |", "",
        f"![accuracy by rank]({PICTURE})", "",
    ]  # fmt: skip
    return "\n".join(lines)


def accuracy_table(paths: RankPaths) -> list[str]:
    """Top-1 to top-10 by head, as Markdown."""
    table = accuracy_by_rank(paths)
    lines = [
        "| head | " + " | ".join(f"top-{rank + 1}" for rank in range(len(table[0]))) + " |",
        "|---|" + "---|" * len(table[0]),
    ]
    for head, shares in enumerate(table, start=1):
        lines.append(f"| {head} | " + " | ".join(f"{100 * share:.1f}" for share in shares) + " |")
    return lines


def draw_accuracy(paths: Sequence[Any], file: Path) -> None:
    """The same as a picture."""
    with picture(file, figsize=(6, 4)) as [[axes]]:
        for head, shares in enumerate(accuracy_by_rank(list(paths)), start=1):
            ranks = range(1, len(shares) + 1)
            axes.plot(ranks, [100 * share for share in shares], marker="o", label=f"head {head}")
        axes.set(
            xlabel="among the head's first ... tokens", ylabel="right, %", ylim=(0, 100),
            title="Held-out text",
        )  # fmt: skip
        axes.legend(frameon=False)
