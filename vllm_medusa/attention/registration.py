"""Having vLLM's layers use a backend of ours, through vLLM's backend registry."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend


@contextmanager
def backend_in_place_of(
    stock: AttentionBackendEnum, backend: type[AttentionBackend]
) -> Iterator[None]:
    """Layers that are built meanwhile use ``backend`` wherever vLLM chooses ``stock``."""
    # vLLM remembers its choices; ours must not outlive, nor be kept from, an engine in this
    # process.
    _cached_get_attn_backend.cache_clear()
    register_backend(stock, f"{backend.__module__}.{backend.__qualname__}")
    try:
        yield
    finally:
        stock.clear_override()
        _cached_get_attn_backend.cache_clear()
