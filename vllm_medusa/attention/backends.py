"""Which attention verifies the trees, and how it lays out the key-value cache."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_medusa.acceptance import AcceptedPaths
from vllm_medusa.attention import cpu, gpu
from vllm_medusa.attention.kernels import load_library, move_slots
from vllm_medusa.compaction import accepted_moves
from vllm_medusa.compaction_kernel import SlotMover


class Mover(Protocol):
    """Moves accepted paths right behind their contexts, in the caches of all layers."""

    def move(self, paths: AcceptedPaths, slots: torch.Tensor, first_rows: torch.Tensor) -> None:
        """See ``SlotMover.move``."""


class CPUSlotMover:
    """In the layout of vLLM's CPU attention."""

    def __init__(self, kv_caches: list[torch.Tensor]) -> None:
        self.kv_caches = kv_caches

    def move(self, paths: AcceptedPaths, slots: torch.Tensor, first_rows: torch.Tensor) -> None:
        """See ``SlotMover.move``."""
        source, target = accepted_moves(paths, slots, first_rows)
        if source.numel():
            move_slots(self.kv_caches, source, target)


def tree_attention(vllm_config: VllmConfig) -> AbstractContextManager[None]:
    """Have layers that are built meanwhile use a backend of ours."""
    asked = vllm_config.attention_config.backend
    # On a CPU Triton is its interpreter, which runs what runs on GPUs when it is asked for.
    if not current_platform.is_cpu() or asked == AttentionBackendEnum.TRITON_ATTN:
        return gpu.tree_attention_backend(vllm_config)
    load_library()  # compiles the kernel if need be: not in the first request's time
    return cpu.tree_attention_backend()


def slot_mover(attn_groups: Any, kv_caches: list[torch.Tensor]) -> Mover:
    """The mover for the layout that the layers' backend gave their caches."""
    if issubclass(attn_groups[0][0].backend, cpu.TreeCPUAttentionBackend):
        return CPUSlotMover(kv_caches)
    return SlotMover(kv_caches)
