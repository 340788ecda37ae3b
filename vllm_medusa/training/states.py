"""Second stage: the target's hidden states, exactly what its LM head reads (after the final norm).

For an answer of n tokens n rows are kept: row i is the state from which token i of the answer was
drawn. They lie in shards of ``ANSWERS_PER_SHARD`` answers, each written under its name only when
it is complete, so the stage can be killed at any moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_medusa.training.answers import Answer, read_answers
from vllm_medusa.whole_file import whole_file

STATES_FOLDER = "states"
ANSWERS_PER_SHARD = 256
# Padded tokens of one forward pass.
BATCH_TOKENS = 4096


def num_shards(num_answers: int) -> int:
    return -(-num_answers // ANSWERS_PER_SHARD)


def shard_path(folder: Path, shard: int) -> Path:
    return folder / f"{shard:05d}.safetensors"


def missing_shards(folder: Path, num_answers: int) -> list[int]:
    """The shards that are not there yet."""
    shards = range(num_shards(num_answers))
    return [shard for shard in shards if not shard_path(folder, shard).exists()]


def compute_states(
    report: Any, model: str, dtype: str, answers_file: Path, folder: Path, device: str | None = None
) -> None:
    """Compute the shards that are missing; runs in a process of its own (``stage_process``).

    Reports (shards that are there, shards in all).

    Raises:
        ValueError: the model's last state is not what its LM head reads.
        OSError: no room for a shard; what is there stays.
    """
    from transformers import AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    answers = read_answers(answers_file)
    shards = num_shards(len(answers))
    missing = missing_shards(folder, len(answers))
    report((shards - len(missing), shards))
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    target = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
    with torch.inference_mode():
        check_states(target, answers[0], model)
        for number, shard in enumerate(missing, start=1):
            part = answers[shard * ANSWERS_PER_SHARD : (shard + 1) * ANSWERS_PER_SHARD]
            save_shard(shard_path(folder, shard), torch.cat(states_of(target, part)))
            report((shards - len(missing) + number, shards))


def states_of(target: Any, answers: Sequence[Answer]) -> list[torch.Tensor]:
    """The states of each answer, [its tokens, hidden], on the CPU."""
    # Answers of like length share a batch, so that little is padded.
    order = sorted(range(len(answers)), key=lambda index: _length(answers[index]))
    states: list[torch.Tensor | None] = [None] * len(answers)
    while order:
        longest = _length(answers[order[-1]])
        batch = order[-max(1, BATCH_TOKENS // longest) :]
        del order[-len(batch) :]
        # Padding behind a sequence is seen by nobody: attention is causal.
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for row, index in enumerate(batch):
            tokens = answers[index].prompt + answers[index].answer[:-1]
            ids[row, : len(tokens)] = torch.tensor(tokens)
        hidden = target.base_model(ids.to(target.device), use_cache=False).last_hidden_state
        for row, index in enumerate(batch):
            first = len(answers[index].prompt) - 1
            rows = hidden[row, first : first + len(answers[index].answer)]
            states[index] = rows.cpu().clone()
    return [state for state in states if state is not None]


def check_states(target: Any, answer: Answer, model: str) -> None:
    """Refuse a model whose last hidden state is not what its LM head reads."""
    read: list[torch.Tensor] = []
    hook = target.get_output_embeddings().register_forward_pre_hook(
        lambda module, inputs: read.append(inputs[0])
    )
    ids = torch.tensor([answer.prompt[:32]], device=target.device)
    target(ids, use_cache=False)
    hook.remove()
    hidden = target.base_model(ids, use_cache=False).last_hidden_state
    if not read or not torch.equal(read[0], hidden):
        raise ValueError(
            f"{model}: its LM head reads something else than its last hidden state, so heads for "
            "it cannot be trained here"
        )


def save_shard(path: Path, states: torch.Tensor) -> None:
    """Write a shard under its name once it is complete."""
    try:
        with whole_file(path) as unfinished:
            save_file({"states": states.contiguous()}, unfinished)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"cannot write {path} ({error}): make room and run the same command again; all that "
            "was finished before is kept"
        ) from error


def load_states(folder: Path, answers: Sequence[Answer]) -> list[torch.Tensor]:
    """The states of each answer, [its tokens, hidden]; the files are mapped, not read."""
    states: list[torch.Tensor] = []
    for shard in range(num_shards(len(answers))):
        part = answers[shard * ANSWERS_PER_SHARD : (shard + 1) * ANSWERS_PER_SHARD]
        with safe_open(shard_path(folder, shard), "pt") as file:
            rows = file.get_tensor("states")
        states += rows.split([len(answer.answer) for answer in part])
    return states


def _length(answer: Answer) -> int:
    return len(answer.prompt) + len(answer.answer) - 1
