"""Rank paths: how well the heads foretold held-out text of the target, and the file of them.

The rank paths of an answer of P + 1 tokens are a uint8 array [P, K]. Row i is what the heads say
when answer token i is the root: entry [i, k] is the rank of the true token i + 1 + k in the list of
head k + 1, given that the true tokens stand on the path to it; ``MISS`` where it is not among the
first ten, and behind the answer's end (i + k >= P). There is no text in them.

Training stores them beside the heads: ``ranks`` uint8 [positions of all answers, K], and
``lengths`` int64 [answers], each answer's P.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_medusa.calibration.errors import CalibrationError
from vllm_medusa.whole_file import whole_file

RANKS_FILE = "medusa_ranks.safetensors"
NUM_RANKS = 10
MISS = 255

RankPaths = list[NDArray[np.uint8]]


def save_ranks(folder: Path, paths: Sequence[NDArray[np.uint8]]) -> Path:
    """Write the file into a folder, whole or not at all; returns its path."""
    from safetensors.numpy import save

    tensors = {
        "ranks": np.concatenate(paths).astype(np.uint8),
        "lengths": np.array([len(path) for path in paths], dtype=np.int64),
    }
    file = folder / RANKS_FILE
    with whole_file(file) as unfinished:
        unfinished.write_bytes(save(tensors))
    return file


def read_ranks(folder: Path) -> RankPaths:
    """The rank paths stored in a folder, one array [positions, K] per answer.

    Raises:
        CalibrationError: no file (says what to do), or one that does not hold what it should.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = folder / RANKS_FILE
    if not file.is_file():
        raise CalibrationError(
            f"{folder} holds no {RANKS_FILE}, which vllm-medusa train stores beside the heads: "
            "give prompts with --data prompts.jsonl to measure the heads on the target's answers"
        )
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CalibrationError(f"{file} cannot be read: {error}") from error
    missing = sorted({"ranks", "lengths"} - set(tensors))
    if missing:
        raise CalibrationError(
            f"{file} lacks the tensors {missing}; it holds {sorted(tensors)}: "
            "measure anew with --data prompts.jsonl"
        )
    ranks, lengths = tensors["ranks"], tensors["lengths"]
    if ranks.ndim != 2 or ranks.dtype != np.uint8:
        raise CalibrationError(
            f"{file}: ranks is {ranks.dtype} {list(ranks.shape)}, expected uint8 [positions, heads]"
        )
    if lengths.ndim != 1 or (lengths < 0).any() or lengths.sum() != len(ranks):
        raise CalibrationError(
            f"{file}: lengths does not add up to the {len(ranks)} positions of ranks"
        )
    return np.split(ranks, np.cumsum(lengths)[:-1])


def check_ranks(paths: Sequence[NDArray[np.uint8]], num_heads: int, where: str) -> None:
    """Refuse rank paths of other heads, and none at all.

    Args:
        paths: the rank paths.
        num_heads: heads in the checkpoint.
        where: what they come from, for the message.
    """
    if not any(map(len, paths)):
        raise CalibrationError(f"{where} holds no positions: give more prompts with --data")
    found = sorted({path.shape[1] for path in paths})
    if found != [num_heads]:
        raise CalibrationError(
            f"{where} is for {found} heads, the checkpoint holds {num_heads}: "
            "measure anew with --data prompts.jsonl"
        )
