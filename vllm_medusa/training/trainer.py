"""Third stage: the heads learn, the target stays as it is. Resumable, on whatever accelerate finds.

Recipe (Medusa, arXiv 2401.10774, appendix B, and its training script): AdamW, learning rate 1e-3,
cosine after a warm-up, cross-entropy weighted 0.8^k; float32 master weights. The checkpoint that
gives the most tokens per step on the validation answers is kept.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.training.answers import ANSWERS_FILE, Answer, read_answers
from vllm_medusa.training.batches import Batch, is_held_out, make_batch
from vllm_medusa.training.data import DataError
from vllm_medusa.training.evaluate import accuracy_by_rank, expected_tokens, rank_paths
from vllm_medusa.training.loss import head_loss
from vllm_medusa.training.memory import advise_on_memory
from vllm_medusa.training.model import HeadsSpec, TargetMatrices, TrainableHeads
from vllm_medusa.training.states import STATES_FOLDER, load_states
from vllm_medusa.whole_file import whole_file, write_whole

TRAINING_FOLDER = "training"
BEST = "best.safetensors"
LOG = "log.jsonl"
SCORED_NODES = 15
Item = tuple[torch.Tensor, Answer]


@dataclass(frozen=True)
class TrainOptions:
    """The recipe.

    Attributes:
        epochs: times each answer is seen.
        batch_answers: answers per step, of all processes together.
        learning_rate: its peak, after the warm-up.
        warmup: share of the steps.
        weight_decay, max_grad_norm: as AdamW and gradient clipping take them.
        distill: share of the loss that takes the target's probabilities for labels.
        validation: share of the conversations that is held out.
        max_validation: of them, at most so many answers are looked at.
        max_steps: stop there, whatever the epochs say.
        save_every: steps between checkpoints to go on from.
        mixed_precision: "no" or "bf16", what accelerate computes products in.
        init: heads to start from, a folder or a hub id; None: each head starts as the LM head.
    """

    epochs: int = 4
    batch_answers: int = 16
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    distill: float = 0.0
    validation: float = 0.05
    max_validation: int = 400
    max_steps: int | None = None
    save_every: int = 200
    mixed_precision: str = "no"
    seed: int = 0
    init: str | None = None


class LossError(ValueError):
    """The loss is no number."""


@dataclass
class Split:
    """Answers with their states, apart."""

    train: list[Item]
    validation: list[Item]

    @classmethod
    def read(cls, work: Path, options: TrainOptions) -> Split:
        """The answers in the work folder.

        Raises:
            DataError: too few of them for a split.
        """
        answers = read_answers(work / ANSWERS_FILE)
        items = zip(load_states(work / STATES_FOLDER, answers), answers, strict=True)
        # A token to guess is the least that an answer must have behind its first.
        usable = [item for item in items if len(item[1].answer) > 1]
        held_out = [is_held_out(answer, options.validation) for _, answer in usable]
        split = cls(
            [item for item, held in zip(usable, held_out, strict=True) if not held],
            [item for item, held in zip(usable, held_out, strict=True) if held],
        )
        if not split.train or not split.validation:
            raise DataError(
                f"{len(usable)} answers are too few to train and to validate on "
                f"(--validation {options.validation}): give more prompts"
            )
        return split


def frequent_tokens(
    items: Sequence[Item], size: int | None, vocab_size: int
) -> torch.Tensor | None:
    """The draft vocabulary: token ids of the most frequent tokens, ascending; None for all."""
    if size is None or size >= vocab_size:
        return None
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for _, answer in items:
        counts += torch.bincount(torch.tensor(answer.answer), minlength=vocab_size)
    return counts.topk(size).indices.sort().values


def embedding_scale(items: Sequence[Item], target: TargetMatrices) -> float:
    """What brings embeddings to the size of states (root mean square)."""
    some = torch.cat([states.float() for states, _ in items[:64]])
    states, embeddings = (float(x.square().mean().sqrt()) for x in (some, target.embeddings))
    return states / embeddings if embeddings else 1.0


def train(report: Any, model: str, work: Path, spec: HeadsSpec, options: TrainOptions) -> None:
    """Train and leave ``best.safetensors`` in ``work/training``; goes on from the last checkpoint.

    Reports dicts with ``step``, ``steps`` and ``loss``, and after each epoch ``tokens_per_step``.

    Raises:
        LossError: the loss is no number; the best heads before it are kept.
    """
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import DistributedDataParallelKwargs, set_seed

    folder = work / TRAINING_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    set_seed(options.seed)
    accelerator = Accelerator(
        mixed_precision=options.mixed_precision,
        # A step is the same however many processes share its answers, so a run has as many steps,
        # and the learning rate falls as it does in one process.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, split_batches=True),
        # The target's matrices are buffers, the same everywhere and never changed.
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
    )
    split = Split.read(work, options)
    target = TargetMatrices.read(model)
    token_map = frequent_tokens(split.train, spec.draft_vocab, target.lm_head.shape[0])
    heads = TrainableHeads(spec, target, token_map, embedding_scale(split.train, target))
    if options.init is not None:
        heads.copy_blocks(load_heads(options.init, dtype=torch.float32))
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
    )
    loader: Any = DataLoader(
        split.train,
        batch_size=options.batch_answers,
        shuffle=True,
        collate_fn=lambda items: make_batch(items, spec.num_heads),
    )
    heads, optimizer, loader = accelerator.prepare(heads, optimizer, loader)
    steps_per_epoch = len(loader)
    steps = steps_per_epoch * options.epochs
    if options.max_steps is not None:
        steps = min(steps, options.max_steps)
    schedule = accelerator.prepare(
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate(step, steps, options)
        )
    )
    progress = Checkpoints(accelerator, folder, schedule)
    dtype = torch.bfloat16 if options.mixed_precision == "bf16" else torch.float32
    step = progress.resume()
    plain = accelerator.unwrap_model(heads)  # what accelerate has perhaps wrapped
    while step < steps:
        for batch in epoch_from(accelerator, loader, step, steps_per_epoch):
            with advise_on_memory("--batch-answers", options.batch_answers):
                head_states = heads(batch.states, batch.paths)
                loss = head_loss(
                    plain, head_states, batch.states, batch.labels, options.distill, dtype
                )
                # Of all processes: where one has none, all of them stop.
                value = accelerator.reduce(loss.detach(), reduction="mean").item()
                if not math.isfinite(value):
                    raise LossError(
                        f"the loss is {value} at step {step + 1} of {steps}: "
                        f"{progress.what_is_kept()}; look at the data, or give --retrain and a "
                        f"smaller --learning-rate than {options.learning_rate}"
                    )
                accelerator.backward(loss)
            accelerator.clip_grad_norm_(heads.parameters(), options.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            report({"step": step, "steps": steps, "loss": value})
            if step % steps_per_epoch == 0 or step == steps:
                record = validate(plain, split.validation, options)
                progress.keep_best(plain, step, record)
                report({"step": step, "steps": steps, "loss": value, **record})
            if step % options.save_every == 0 or step == steps:
                progress.save(step)
            if step == steps:
                break


def learning_rate(step: int, steps: int, options: TrainOptions) -> float:
    """Share of the peak: a linear warm-up, then a cosine to 0."""
    warmup = max(1, round(options.warmup * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def epoch_from(accelerator: Any, loader: Any, step: int, steps_per_epoch: int) -> Iterator[Batch]:
    """The rest of the epoch that a step lies in, in that epoch's order."""
    epoch, done = divmod(step, steps_per_epoch)
    loader.set_epoch(epoch)
    if done:
        loader = accelerator.skip_first_batches(loader, done)
        loader.set_epoch(epoch)
    for batch in loader:
        yield Batch(*batch)


def validate(heads: TrainableHeads, items: Sequence[Item], options: TrainOptions) -> dict[str, Any]:
    """Accuracies and tokens per step on the validation answers."""
    paths = rank_paths(heads, items[: options.max_validation])
    num_ranks = heads.lm_head.shape[0]
    return {
        "tokens_per_step": expected_tokens(paths, (1, 3, 7, 15, 63), num_ranks),
        "top1": [round(ranks[0], 4) for ranks in accuracy_by_rank(paths)],
    }


class Checkpoints:
    """The last state to go on from, the best heads so far, and the log of validations."""

    def __init__(self, accelerator: Any, folder: Path, schedule: Any) -> None:
        self.accelerator = accelerator
        self.folder = folder
        accelerator.register_for_checkpointing(schedule)

    def resume(self) -> int:
        """Load the last checkpoint; returns the steps that are done."""
        saved = self._saved()
        if not saved:
            if self.accelerator.is_main_process:
                (self.folder / LOG).unlink(missing_ok=True)
                (self.folder / BEST).unlink(missing_ok=True)
            return 0
        self.accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.removeprefix("step-"))
        if self.accelerator.is_main_process:
            # What came after it will come again.
            kept = [line for line in read_log(self.folder) if line["step"] <= step]
            self._write_log(kept)
        return step

    def what_is_kept(self) -> str:
        """What a run that fails leaves, in words."""
        if (self.folder / BEST).exists():
            return f"the heads of the best checkpoint before it are in {self.folder / BEST}"
        if saved := self._saved():
            return f"the last checkpoint before it is {saved[-1]}"
        return "there is no checkpoint before it yet"

    def save(self, step: int) -> None:
        """Write the state under its name once it is complete, and delete those before it."""
        final = self.folder / f"step-{step}"
        if self.accelerator.is_main_process:
            shutil.rmtree(final, ignore_errors=True)
        before = self._saved()
        unfinished = self.folder / "unfinished"
        try:
            self.accelerator.save_state(str(unfinished))
        except (OSError, RuntimeError) as error:
            raise OSError(
                f"cannot write a checkpoint into {self.folder} ({error}): make room and run the "
                "same command again; it goes on from the checkpoint before"
            ) from error
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            os.replace(unfinished, final)
            for folder in before:
                shutil.rmtree(folder)
        self.accelerator.wait_for_everyone()

    def keep_best(self, heads: TrainableHeads, step: int, record: dict[str, Any]) -> None:
        """Keep the heads if no earlier ones gave more tokens per step."""
        if not self.accelerator.is_main_process:
            return
        log = read_log(self.folder)
        score = record["tokens_per_step"][SCORED_NODES]
        best = max((line["tokens_per_step"][str(SCORED_NODES)] for line in log), default=0.0)
        if score > best:
            save_heads_file(heads, self.folder / BEST)
        self._write_log([*log, {"step": step, **record}])

    def _write_log(self, lines: Sequence[dict[str, Any]]) -> None:
        write_whole(self.folder / LOG, "".join(json.dumps(line) + "\n" for line in lines))

    def _saved(self) -> list[Path]:
        saved = [path for path in self.folder.glob("step-*") if path.is_dir()]
        return sorted(saved, key=lambda path: int(path.name.removeprefix("step-")))


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The validations so far, oldest first."""
    file = folder / LOG
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def save_heads_file(heads: TrainableHeads, file: Path) -> None:
    """The trained parameters and the draft vocabulary, for ``load_heads_file``."""
    tensors = {name: value.detach().cpu() for name, value in heads.named_parameters()}
    tensors["embedding_scale"] = torch.tensor(heads.embedding_scale, dtype=torch.float64)
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map
    with whole_file(file) as unfinished:
        save_file(tensors, unfinished)


def load_heads_file(file: Path, spec: HeadsSpec, target: TargetMatrices) -> TrainableHeads:
    """The heads of ``save_heads_file``."""
    tensors = load_file(file)
    scale = float(tensors.pop("embedding_scale"))
    heads = TrainableHeads(spec, target, tensors.pop("token_map", None), scale)
    heads.load_state_dict(tensors, strict=True)
    return heads
