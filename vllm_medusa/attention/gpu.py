"""Which attention backend serves trees on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_medusa.attention.registration import backend_in_place_of
from vllm_medusa.attention.triton_tree import MAX_HEAD_SIZE

logger = init_logger(f"vllm.{__name__}")

FLASH_ATTN, TRITON_ATTN = AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN


@dataclass(frozen=True)
class Choice:
    """A backend of vLLM's that we extend with trees, and why it and no other."""

    backend: AttentionBackendEnum
    reason: str


def choose(
    asked: AttentionBackendEnum | None,
    flash_attention_version: int | None,
    head_size: int,
    dtype: torch.dtype,
) -> Choice:
    """Choose between vLLM's FlashAttention and Triton backends.

    FlashAttention where it is vLLM's own choice (capability 8 and 9) and was adapted, else Triton.

    Args:
        asked: ``attention_config.backend``; None leaves the choice to us.
        flash_attention_version: that runs on this device at this head size; None: none.
        head_size: of the target.
        dtype: of the target.

    Raises:
        ValueError: what was asked for ignores trees, or was not adapted to this target.
    """
    if head_size > MAX_HEAD_SIZE:
        raise ValueError(f"head size {head_size}: the tree kernel takes {MAX_HEAD_SIZE} at most")
    if asked not in (None, FLASH_ATTN, TRITON_ATTN):
        raise ValueError(
            f"attention backend {asked.name} would ignore the trees: leave --attention-backend "
            "out, or choose FLASH_ATTN or TRITON_ATTN"
        )
    if asked == TRITON_ATTN:
        return Choice(TRITON_ATTN, "asked for")
    if flash_attention_version is None:
        obstacle = "FlashAttention does not run here"
    elif flash_attention_version not in (2, 3):
        obstacle = f"FlashAttention {flash_attention_version} is not adapted to trees, 2 and 3 are"
    elif dtype not in (torch.float16, torch.bfloat16):
        obstacle = f"FlashAttention does not take {dtype}"
    elif head_size % 8:
        obstacle = f"FlashAttention does not take head size {head_size}, no multiple of 8"
    elif asked == FLASH_ATTN:
        return Choice(FLASH_ATTN, "asked for")
    else:
        return Choice(FLASH_ATTN, f"FlashAttention {flash_attention_version} runs here")
    if asked == FLASH_ATTN:
        raise ValueError(f"attention backend FLASH_ATTN: {obstacle}; choose TRITON_ATTN")
    return Choice(TRITON_ATTN, obstacle)


def choose_attention(config: VllmConfig) -> Choice:
    """``choose`` for the device and the configuration at hand, said in the log.

    Raises:
        ValueError: nothing that can serve trees fits the configuration.
    """
    attention, model = config.attention_config, config.model_config
    if attention.backend_per_kind:
        raise ValueError(
            f"attention_config.backend_per_kind {attention.backend_per_kind}: leave it out, trees "
            "need one backend for all layers"
        )
    if not HAS_TRITON:
        raise ValueError(
            f"no Triton for {current_platform.device_name}: trees need CUDA with Triton"
        )
    version, head_size = None, model.get_head_size()
    if current_platform.is_cuda():
        if not current_platform.has_device_capability(80):
            raise ValueError(
                f"{current_platform.get_device_name()}: the tree kernel needs compute capability "
                "8.0 (Ampere) or newer"
            )
        version = attention.flash_attn_version or get_flash_attn_version(head_size=head_size)
    choice = choose(attention.backend, version, head_size, model.dtype)
    logger.info_once(
        "Medusa: attention backend %s with trees (%s).", choice.backend.name, choice.reason
    )
    return choice


def tree_backend(choice: Choice) -> type[AttentionBackend]:
    """Our backend on top of the chosen one."""
    if choice.backend == FLASH_ATTN:
        from vllm_medusa.attention.flash_backend import TreeFlashBackend

        return TreeFlashBackend
    from vllm_medusa.attention.triton_backend import TreeTritonBackend

    return TreeTritonBackend


@contextmanager
def tree_attention_backend(config: VllmConfig) -> Iterator[None]:
    """Have layers that are built meanwhile use our backend; ``layers.py`` checks that they do.

    Raises:
        ValueError: as ``choose_attention``.
    """
    choice = choose_attention(config)
    stock = choice.backend
    if current_platform.is_cpu():  # Triton's interpreter; vLLM chooses no other backend there
        stock = AttentionBackendEnum.CPU_ATTN
    else:
        config.attention_config.backend = stock
    with backend_in_place_of(stock, tree_backend(choice)):
        yield
