"""Who serves trees on a GPU, and who computes which requests of a step."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_medusa.attention.cpu import TreeCPUAttentionBackend, tree_attention_backend
from vllm_medusa.attention.gpu import FLASH_ATTN, TRITON_ATTN, choose
from vllm_medusa.attention.layers import check_attention_layers
from vllm_medusa.attention.short_requests import split_batch


@pytest.mark.parametrize(
    ("asked", "version", "head_size", "dtype", "chosen", "reason"),
    [
        (None, 3, 128, torch.bfloat16, FLASH_ATTN, "FlashAttention 3 runs here"),
        (None, 2, 80, torch.float16, FLASH_ATTN, "FlashAttention 2 runs here"),
        (None, 4, 128, torch.bfloat16, TRITON_ATTN, "FlashAttention 4 is not adapted"),
        (None, None, 128, torch.bfloat16, TRITON_ATTN, "does not run here"),
        (None, 2, 128, torch.float32, TRITON_ATTN, "does not take torch.float32"),
        (None, 2, 100, torch.float16, TRITON_ATTN, "does not take head size 100"),
        (TRITON_ATTN, 3, 128, torch.bfloat16, TRITON_ATTN, "asked for"),
        (FLASH_ATTN, 3, 128, torch.bfloat16, FLASH_ATTN, "asked for"),
    ],
)
def test_choice(asked, version, head_size, dtype, chosen, reason):
    choice = choose(asked, version, head_size, dtype)
    assert choice.backend == chosen
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("asked", "version", "head_size", "message"),
    [
        (FLASH_ATTN, 4, 128, "FlashAttention 4 is not adapted.*choose TRITON_ATTN"),
        (FLASH_ATTN, None, 128, "does not run here"),
        (None, 3, 512, "head size 512: the tree kernel takes 256"),
        *(
            (backend, 3, 128, f"{backend.name} would ignore the trees")
            for backend in AttentionBackendEnum
            if backend not in (FLASH_ATTN, TRITON_ATTN)
        ),
    ],
)
def test_refused(asked, version, head_size, message):
    with pytest.raises(ValueError, match=message):
        choose(asked, version, head_size, torch.bfloat16)


@pytest.mark.parametrize(
    ("query_lens", "num_short", "first_stock"),
    [
        ([9, 9, 9], 3, 3),
        ([9, 1, 128, 0], 4, 4),
        ([9, 1, 129, 4000], 2, 2),
        ([129], 0, 0),
        ([129, 129], 0, 0),
        ([9, 129, 9], 3, 0),
        ([129, 9], 2, 0),
        ([9, 129, 9, 129], 4, 0),
    ],
)
def test_split_batch(query_lens, num_short, first_stock):
    assert split_batch(torch.tensor(query_lens)) == (num_short, first_stock)


def make_layer(**changes):
    """A layer as vLLM builds it for a Llama, changed in one thing."""
    layer = Attention.__new__(Attention)
    torch.nn.Module.__init__(layer)
    impl = {name: changes.pop(name, None) for name in ("logits_soft_cap", "alibi_slopes", "sinks")}
    impl["chunk_lookback"] = changes.pop("chunk_lookback", -1)
    fields = {
        "attn_backend": TreeCPUAttentionBackend,
        "impl": SimpleNamespace(**impl),
        "sliding_window": None,
        "kv_cache_dtype": "auto",
        "head_size": 64,
        "head_size_v": 64,
        "attn_type": AttentionType.DECODER,
        "kv_sharing_target_layer_name": None,
    }
    vars(layer).update(fields | changes)
    return layer


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_backend": CPUAttentionBackend}, "CPU_ATTN, which ignores trees"),
        ({"sliding_window": 128}, "sliding window"),
        ({"chunk_lookback": 0}, "chunked attention"),
        ({"logits_soft_cap": 30.0}, "logit soft cap"),
        ({"alibi_slopes": torch.ones(4)}, "ALiBi"),
        ({"sinks": torch.ones(4)}, "attention sinks"),
        ({"kv_cache_dtype": "fp8"}, "a quantised KV cache"),
        ({"head_size_v": 32}, "keys and values of different sizes"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "a KV cache shared between layers"),
    ],
)
def test_layers_refused(changes, message):
    check_attention_layers({"layers.0": make_layer()})
    with pytest.raises(ValueError, match=rf"{message}.*\(layer layers.1\)"):
        check_attention_layers({"layers.0": make_layer(), "layers.1": make_layer(**changes)})


def test_other_kinds_of_layers_are_refused():
    class Chunked(Attention):
        pass

    layer = make_layer()
    layer.__class__ = Chunked
    for other in (layer, torch.nn.Linear(1, 1)):
        with pytest.raises(ValueError, match=f"layer x of type {type(other).__name__}"):
            check_attention_layers({"x": other})


def test_backend_is_replaced_only_meanwhile():
    backend = AttentionBackendEnum.CPU_ATTN
    with pytest.raises(RuntimeError), tree_attention_backend():
        assert backend.get_class() is TreeCPUAttentionBackend
        raise RuntimeError
    assert backend.get_class() is CPUAttentionBackend
