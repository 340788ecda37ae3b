"""Several training processes, as ``accelerate launch`` and ``torchrun`` start them.

The first one does all that is done once; the others wait for it, then all train together.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta

from vllm_medusa.stage_process import StageError

# How long the others wait while the target answers.
LONGEST_WAIT = timedelta(days=30)


def num_processes() -> int:
    """How many there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this is the one that prepares and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def prepare_in_first(prepare: Callable[[], object]) -> None:
    """Call a function in the first process; the others return once it has.

    Raises:
        StageError: in the others, the first one failed. There, its own error is raised.
    """
    if num_processes() == 1:
        prepare()
        return
    from accelerate import PartialState
    from torch import distributed

    PartialState()  # Joins the processes, with what accelerate finds for training.
    # NCCL gives up waiting after minutes; gloo waits as long as it is told, and without the GPU.
    group = distributed.new_group(backend="gloo", timeout=LONGEST_WAIT)
    if is_first():
        try:
            prepare()
        except BaseException:
            with contextlib.suppress(RuntimeError):
                distributed.broadcast_object_list([False], src=0, group=group)
            raise
        distributed.broadcast_object_list([True], src=0, group=group)
        return
    went_well = [False]
    # It raises where the first process has ended without a word.
    with contextlib.suppress(RuntimeError):
        distributed.broadcast_object_list(went_well, src=0, group=group)
    if not went_well[0]:
        raise StageError(
            f"process {os.environ['RANK']} ends because process 0 failed: see its message"
        )


def part() -> None:
    """Nothing is done together any more."""
    if num_processes() > 1:
        from torch import distributed

        distributed.destroy_process_group()
