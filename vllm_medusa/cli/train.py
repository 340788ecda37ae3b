"""``vllm-medusa train MODEL --data prompts.jsonl --output HEADS``: heads for a model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vllm_medusa.cli.chat_template import read_chat_template
from vllm_medusa.cli.errors import print_error

# What --dry-run does: a few short answers, two steps, and everything that a real run writes.
DRY_RUN = {"tokens": 256, "max_answer_tokens": 24, "max_steps": 2, "validation": 0.5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the sub-command. Defaults are the recipe (see docs/training.md)."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="the target: a folder or hub id")
    parser.add_argument("--data", type=Path, metavar="FILE", help="JSONL of prompts or chats")
    parser.add_argument("--output", type=Path, metavar="HEADS", help="folder for the heads")
    parser.add_argument(
        "--config", type=Path, metavar="run.yaml", help="options of an earlier run, to repeat it"
    )
    parser.add_argument(
        "--work", type=Path, metavar="FOLDER",
        help="what is kept between starts (default: the output's name with .work)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--note", metavar="TEXT", help="for the model card: where the data comes from, licences"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="two steps on a few answers, everything touched"
    )
    parser.add_argument("--dtype", default="auto", help="of the target, as vllm serve --dtype")
    parser.add_argument(
        "--store-dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="of the stored heads (auto: the target's)",
    )  # fmt: skip
    parser.add_argument("--chat-template", type=Path, metavar="FILE", help="for a model without")
    parser.add_argument("--max-bad-lines", type=int, default=10, help="of the data, skipped")

    answers = parser.add_argument_group("answers of the target")
    answers.add_argument(
        "--no-regenerate", action="store_true", help="train on the answers that the data holds"
    )
    answers.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.0, 0.0, 1.0],
        help="conversations take them in turn (default: three greedy, one at 1)",
    )  # fmt: skip
    answers.add_argument("--max-answer-tokens", type=int, default=256)
    answers.add_argument("--max-turns", type=int, default=1, help="answered per conversation")
    answers.add_argument("--max-length", type=int, default=2048, help="prompt and answer, tokens")
    answers.add_argument("--tokens", type=int, help="enough answers to stop (default: all prompts)")
    answers.add_argument("--max-num-seqs", type=int, default=128, help="answered at once")

    heads = parser.add_argument_group("heads")
    heads.add_argument("--head-type", choices=("plain", "sequential"), default="sequential")
    heads.add_argument("--heads", type=int, default=4, metavar="K")
    heads.add_argument("--layers", type=int, default=1, help="residual blocks per head")
    heads.add_argument(
        "--own-lm-heads", action="store_true", help="an LM head per head, trained too"
    )
    heads.add_argument(
        "--init", metavar="HEADS", help="start from these heads, perhaps with more --layers"
    )
    heads.add_argument(
        "--draft-vocab", type=int, default=16384, metavar="TOKENS",
        help="the most frequent tokens of the answers that can be drafted; 0: all",
    )  # fmt: skip

    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--epochs", type=int, default=4)
    recipe.add_argument("--batch-answers", type=int, default=16, help="answers per step")
    recipe.add_argument("--learning-rate", type=float, default=1e-3)
    recipe.add_argument("--warmup", type=float, default=0.05, help="share of the steps")
    recipe.add_argument("--weight-decay", type=float, default=0.01)
    recipe.add_argument("--max-grad-norm", type=float, default=1.0)
    recipe.add_argument(
        "--distill", type=float, default=0.0,
        help="share of the loss against the target's probabilities (default: none)",
    )  # fmt: skip
    recipe.add_argument("--validation", type=float, default=0.05, help="share held out")
    recipe.add_argument("--max-validation", type=int, default=400, help="answers of it looked at")
    recipe.add_argument("--max-steps", type=int)
    recipe.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    recipe.add_argument(
        "--mixed-precision", choices=("auto", "no", "bf16"), default="auto",
        help="what products are computed in (auto: bf16 where the hardware has it)",
    )  # fmt: skip
    recipe.add_argument(
        "--retrain", action="store_true", help="with another recipe, on the answers made before"
    )
    # What is not given is missing from the parsed options: the options of --config come between
    # those that are given and the defaults.
    parser.set_defaults(defaults=vars(parser.parse_args([])))
    for action in parser._actions:
        action.default = argparse.SUPPRESS


def run(args: argparse.Namespace) -> int:
    """Train; 1 with a message on failure, 130 where it was stopped."""
    from rich.console import Console

    from vllm_medusa.heads.checkpoint import HeadsError
    from vllm_medusa.stage_process import StageError
    from vllm_medusa.training.data import DataError
    from vllm_medusa.training.run import run_training

    console = Console()
    try:
        run_training(console, options_of(args))
    except (DataError, HeadsError, StageError, OSError, ValueError) as error:
        print_error("train", error)
        return 1
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on where it was")
        return 130
    return 0


def options_of(args: argparse.Namespace) -> Any:
    """The run's options, from the command line and the file of --config.

    Raises:
        DataError: an option is missing or makes no sense.
    """
    from vllm_medusa.training.answers import AnswerOptions
    from vllm_medusa.training.data import DataError
    from vllm_medusa.training.model import HeadsSpec
    from vllm_medusa.training.run import RunOptions
    from vllm_medusa.training.trainer import TrainOptions

    given = vars(args)
    values = args.defaults | _from_file(args, given) | given
    if values["dry_run"]:
        values |= DRY_RUN
    missing = [f"--{name}" for name in ("data", "output") if not values[name]]
    if not values["model"] or missing:
        raise DataError(f"missing: {' '.join(missing if values['model'] else ['MODEL', *missing])}")
    for name in ("heads", "epochs", "batch_answers", "max_answer_tokens", "max_turns"):
        if values[name] < 1:
            raise DataError(f"--{name.replace('_', '-')} is {values[name]}: expected 1 or more")
    for name in ("distill", "validation", "warmup"):
        if not 0 <= values[name] <= 1:
            raise DataError(f"--{name} is {values[name]}: expected a share from 0 to 1")
    if values["layers"] < 1 and values["head_type"] == "sequential":
        raise DataError("--layers 0: a sequential head needs a block to read the path with")
    output = Path(values["output"])
    if values["dry_run"]:
        output = output.with_name(f"{output.name}.dry-run")
    template = values["chat_template"]
    return RunOptions(
        model=values["model"],
        data=Path(values["data"]),
        output=output,
        work=values["work"] or output.with_name(f"{output.name}.work"),
        dtype=values["dtype"],
        store_dtype=values["store_dtype"],
        max_num_seqs=values["max_num_seqs"],
        max_bad_lines=values["max_bad_lines"],
        chat_template=read_chat_template(Path(template) if template else None),
        retrain=values["retrain"],
        note=values["note"],
        answers=AnswerOptions(
            temperatures=tuple(values["temperatures"]),
            max_answer_tokens=values["max_answer_tokens"],
            max_turns=values["max_turns"],
            max_length=values["max_length"],
            num_tokens=values["tokens"],
            regenerate=not values["no_regenerate"],
            seed=values["seed"],
        ),
        heads=HeadsSpec(
            head_type=values["head_type"],
            num_heads=values["heads"],
            num_layers=values["layers"],
            own_lm_heads=values["own_lm_heads"],
            draft_vocab=values["draft_vocab"] or None,
        ),
        training=TrainOptions(
            epochs=values["epochs"],
            batch_answers=values["batch_answers"],
            learning_rate=values["learning_rate"],
            warmup=values["warmup"],
            weight_decay=values["weight_decay"],
            max_grad_norm=values["max_grad_norm"],
            distill=values["distill"],
            validation=values["validation"],
            max_validation=values["max_validation"],
            max_steps=values["max_steps"],
            save_every=values["save_every"],
            mixed_precision=_precision(values["mixed_precision"]),
            seed=values["seed"],
            init=values["init"],
        ),
    )


def _from_file(args: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    """Options of --config; those that are given on the command line win."""
    if "config" not in given:
        return {}
    import yaml

    from vllm_medusa.training.data import DataError

    config = given["config"]
    try:
        stored = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise DataError(f"cannot read --config {config}: {error}") from error
    is_mapping = isinstance(stored, dict)
    unknown = sorted(set(stored) - set(args.defaults)) if is_mapping else [str(stored)]
    if unknown:
        raise DataError(f"--config {config} holds unknown options: {', '.join(unknown)}")
    init = stored.get("init")
    if init and "init" not in given and "/" not in init:
        raise DataError(
            f"--config {config}: that run started from heads of its own, {init}: give them with "
            "--init; the model card beside it says how they were made"
        )
    if stored.get("chat_template"):
        stored["chat_template"] = config.parent / stored["chat_template"]
    return stored


def _precision(asked: str) -> str:
    import torch

    from vllm_medusa.machine import instruction_sets

    if asked != "auto":
        return asked
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "no"
    # Without the matrix unit, bfloat16 products on a CPU are slower than float32 ones.
    return "bf16" if "amx_tile" in instruction_sets() else "no"
