"""Which attention layers our kernels compute."""

from typing import Any


def check_attention_layers(layers: dict[str, Any]) -> None:
    """Refuse attention that the tree kernels do not compute, layer by layer as vLLM built them.

    Args:
        layers: ``CompilationConfig.static_forward_context``, layers by name.

    Raises:
        ValueError: names the layer and what it needs.
    """
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache

    for name, layer in layers.items():
        # Subclasses change the mask, the cache or both.
        if type(layer) is not Attention:
            raise ValueError(f"medusa cannot serve layer {name} of type {type(layer).__name__}")
        backend, impl = layer.attn_backend, layer.impl
        found = {
            f"attention backend {backend.get_name()}, which ignores trees": not hasattr(
                backend.get_builder_cls(), "set_trees"
            ),
            "sliding window": layer.sliding_window is not None,
            "chunked attention": getattr(impl, "chunk_lookback", -1) != -1,
            "logit soft cap": bool(impl.logits_soft_cap),
            "ALiBi": impl.alibi_slopes is not None,
            "attention sinks": impl.sinks is not None,
            "a quantised KV cache": is_quantized_kv_cache(layer.kv_cache_dtype),
            "keys and values of different sizes": layer.head_size_v != layer.head_size,
            f"attention type {layer.attn_type}": layer.attn_type != AttentionType.DECODER,
            "a KV cache shared between layers": layer.kv_sharing_target_layer_name is not None,
        }
        for feature, is_there in found.items():
            if is_there:
                raise ValueError(f"medusa cannot serve {feature} (layer {name})")


def check_one_group(kv_cache_config: Any) -> None:
    """Refuse a target whose layers keep their caches in different ways."""
    groups = len(kv_cache_config.kv_cache_groups)
    if groups != 1:
        raise ValueError(
            f"medusa needs one group of KV cache layers, this target has {groups}: its layers "
            "keep their caches in different ways"
        )
