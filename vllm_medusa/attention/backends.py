"""Which attention verifies the trees, and how it lays out the key-value cache."""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from vllm_medusa.acceptance import AcceptedPaths
from vllm_medusa.attention.cpu import tree_attention_backend
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
    load_library()  # compiles the kernel if need be: not in the first request's time
    return tree_attention_backend()


def slot_mover(attn_groups: Any, kv_caches: list[torch.Tensor]) -> Mover:
    """The mover for the layout that the layers' backend gave their caches."""
    if issubclass(attn_groups[0][0].backend, CPUAttentionBackend):
        return CPUSlotMover(kv_caches)
    return SlotMover(kv_caches)


def check_one_group(kv_cache_config: Any) -> None:
    """Refuse a target whose layers keep their caches in different ways."""
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ValueError(
            f"medusa needs one group of KV cache layers, this target has {groups}: its layers "
            "keep their caches in different ways"
        )


def check_attention_layers(layers: dict[str, Any]) -> None:
    """Refuse attention that the tree kernel does not compute, layer by layer as vLLM built them."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType

    for name, layer in layers.items():
        impl: Any = getattr(layer, "impl", None)
        if not isinstance(layer, Attention):
            raise ValueError(f"medusa cannot serve layer {name} of type {type(layer).__name__}")
        found = {
            "sliding window": impl.sliding_window != -1,
            "logit soft cap": bool(impl.logits_soft_cap),
            "ALiBi": impl.alibi_slopes is not None,
            "attention sinks": impl.sinks is not None,
            "a quantised KV cache": impl.is_fp8_kv_cache,
            f"attention type {impl.attn_type}": impl.attn_type != AttentionType.DECODER,
            "a KV cache shared between layers": impl.kv_sharing_target_layer_name is not None,
        }
        for feature, is_there in found.items():
            if is_there:
                raise ValueError(f"medusa cannot serve {feature} (layer {name})")
