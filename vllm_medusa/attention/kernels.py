"""The compiled kernels of tree_attention.cpp: building, loading, calling.

They are compiled at first use, for the CPU at hand, with the C++ compiler of the machine, and kept
in the user's cache. Without a compiler reference.py takes over, with a warning: the same results,
slower.

``python -m vllm_medusa.attention.kernels`` builds them ahead of time.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from vllm_medusa.attention import reference

logger = logging.getLogger(f"vllm.{__name__}")

MAX_TREE_ROWS = 128
"""Rows of one request at most, root included: the bits of an ancestor mask."""

_SOURCE = Path(__file__).with_name("tree_attention.cpp")
# Linked without -fopenmp: the OpenMP runtime is not recorded as a dependency, its symbols come from
# what the process runs on (torch's libgomp, or a preloaded libiomp5). Two runtimes would be two
# pools of spinning threads on the same cores.
_COMPILE_FLAGS = "-std=c++17 -O3 -march=native -fopenmp -fPIC -fno-exceptions -fno-rtti"
_LINK_FLAGS = "-shared"

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ERRORS = {
    1: "tree_index names a tree that ancestors does not hold",
    2: f"a request with a tree has more than {MAX_TREE_ROWS} rows, or more rows than seq_lens says",
    3: "out of memory for the scratch of the tree attention kernel",
}


class _RowsStruct(ctypes.Structure):
    """struct TreeRows of tree_attention.cpp."""

    _fields_ = (
        ("num_requests", ctypes.c_int64),
        ("query_start_loc", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("block_table_stride", ctypes.c_int64),
        ("tree_index", ctypes.c_void_p),
        ("ancestors", ctypes.c_void_p),
        ("num_trees", ctypes.c_int64),
    )


class _ShapeStruct(ctypes.Structure):
    """struct LayerShape of tree_attention.cpp; strides in elements."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "dtype",
            "num_heads",
            "num_kv_heads",
            "head_size",
            "block_size",
            "query_stride",
            "output_stride",
            "block_stride",
            "kv_head_stride",
            "num_threads",
        )
    )


@dataclass(frozen=True, eq=False)
class TreeRows:
    """The query rows of one step, built once and used by all layers.

    Request b has the rows query_start_loc[b] to query_start_loc[b + 1]: the root, then the nodes of
    its tree, parents first. Its context is the seq_lens[b] tokens less those rows.

    Attributes:
        query_start_loc: int32 [B + 1].
        seq_lens: int32 [B], tokens of context and rows of this step together.
        block_table: int32 [B, max_blocks], may be a slice of a wider one.
        tree_index: int32 [B], index into ``ancestors``; -1: leave this request's output alone.
        ancestors: int64 [trees, 128, 2], 128-bit masks, low word first: bit j of row i is set if
            row i sees row j. Row 0, the root, and the row itself are to be set.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    tree_index: torch.Tensor
    ancestors: torch.Tensor
    # Addresses of the packed structs by everything about a layer's tensors but their addresses.
    _calls: dict[tuple, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)
    _structs: list[ctypes.Structure] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        int32 = {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "tree_index": self.tree_index,
        }
        for name, tensor in int32.items():
            if tensor.dtype != torch.int32 or not tensor.is_cpu or tensor.stride(-1) != 1:
                raise ValueError(
                    f"{name} must be int32 on the CPU with adjacent elements, not {tensor.dtype} "
                    f"on {tensor.device} with strides {tensor.stride()}"
                )
        num_requests = self.tree_index.shape[0]
        if (
            self.query_start_loc.shape[0] < num_requests + 1
            or self.seq_lens.shape[0] < num_requests
            or self.block_table.shape[0] < num_requests
        ):
            raise ValueError(
                f"tree_index names {num_requests} requests, but query_start_loc has "
                f"{tuple(self.query_start_loc.shape)}, seq_lens {tuple(self.seq_lens.shape)} and "
                f"block_table {tuple(self.block_table.shape)}"
            )
        ancestors = self.ancestors
        if (
            ancestors.dtype not in (torch.int64, torch.uint64)
            or ancestors.shape[1:] != (MAX_TREE_ROWS, 2)
            or not (ancestors.is_cpu and ancestors.is_contiguous())
        ):
            raise ValueError(
                f"ancestors must be contiguous int64 [trees, {MAX_TREE_ROWS}, 2] on the CPU, not "
                f"{ancestors.dtype} {tuple(ancestors.shape)} on {ancestors.device}"
            )

    def _prepare(
        self, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor
    ) -> tuple[int, int]:
        """Check the tensors of a layer and pack what is constant over layers like it."""
        if query.shape != output.shape or not query.dtype == output.dtype == kv_cache.dtype:
            raise ValueError(
                f"query {query.dtype} {tuple(query.shape)}, output {output.dtype} "
                f"{tuple(output.shape)} and KV cache {kv_cache.dtype} must agree"
            )
        tokens, num_heads, head_size = query.shape
        shape = _pack_shape(kv_cache)
        if head_size != shape.head_size or num_heads % shape.num_kv_heads:
            raise ValueError(
                f"query {tuple(query.shape)} does not fit a KV cache {tuple(kv_cache.shape)}"
            )
        for tensor in (query, output):
            if tensor.stride()[1:] != (head_size, 1) or not tensor.is_cpu:
                raise ValueError(
                    "the heads of a token must be adjacent in query and output, on the CPU; "
                    f"strides are {tensor.stride()}"
                )
        num_requests = self.tree_index.shape[0]
        if int(self.query_start_loc[num_requests]) > tokens:
            raise ValueError(f"query has {tokens} rows, fewer than query_start_loc says")
        shape.num_heads = num_heads
        shape.query_stride = query.stride(0)
        shape.output_stride = output.stride(0)
        rows = _RowsStruct(
            num_requests,
            self.query_start_loc.data_ptr(),
            self.seq_lens.data_ptr(),
            self.block_table.data_ptr(),
            self.block_table.stride(0),
            self.tree_index.data_ptr(),
            self.ancestors.data_ptr(),
            self.ancestors.shape[0],
        )
        self._structs.extend((rows, shape))
        return ctypes.addressof(rows), ctypes.addressof(shape)


def tree_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    output: torch.Tensor,
    rows: TreeRows,
    scale: float,
) -> None:
    """Write the attention of every row whose request has a tree into ``output``.

    The keys and values of the rows themselves are in the cache already, behind the context.

    Args:
        query: [tokens, heads, head_size], float32, bfloat16 or float16; head_size is a multiple of
            16, 512 at most.
        kv_cache: [blocks, kv_heads, block_size, 2 * head_size], same dtype, as vLLM hands it to its
            CPU backend and fills it with ISA "vec" or "vec16"; block_size is a multiple of 16.
        output: [tokens, heads, head_size], same dtype; rows of other requests are left alone.
        rows: which rows there are and what they see.
        scale: factor of the scores before the softmax.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    library = load_library()
    if library is None:
        reference.tree_attention(query, kv_cache, output, rows, scale)
        return
    key = (
        query.shape,
        query.dtype,
        query.stride(),
        output.shape,
        output.dtype,
        output.stride(),
        kv_cache.shape,
        kv_cache.dtype,
        kv_cache.stride(),
    )
    call = rows._calls.get(key)
    if call is None:
        call = rows._calls[key] = rows._prepare(query, kv_cache, output)
    error = library.medusa_tree_attention(
        *call, query.data_ptr(), kv_cache.data_ptr(), output.data_ptr(), scale
    )
    if error:
        raise ValueError(_ERRORS[error])


def move_slots(
    kv_caches: Sequence[torch.Tensor], source_slots: torch.Tensor, target_slots: torch.Tensor
) -> None:
    """Copy keys and values from slot to slot in every layer, one move after the other.

    Args:
        kv_caches: one per layer, as in ``tree_attention``, all of one shape, dtype and strides.
        source_slots: int64 [M], block * block_size + place in the block.
        target_slots: int64 [M]. A move may overwrite the source of an earlier one.

    Raises:
        ValueError: the caches differ in more than their addresses, or the slots are not int64 [M].
    """
    if not kv_caches or not source_slots.numel():
        return
    first = kv_caches[0]
    if any(
        other.shape != first.shape or other.dtype != first.dtype or other.stride() != first.stride()
        for other in kv_caches
    ):
        raise ValueError("the KV caches must agree in shape, dtype and strides; call once per kind")
    source_slots, target_slots = source_slots.contiguous(), target_slots.contiguous()
    for slots in (source_slots, target_slots):
        if slots.dtype != torch.int64 or slots.shape != source_slots.shape or not slots.is_cpu:
            raise ValueError(f"slots must be int64 [M] on the CPU, not {slots.dtype} {slots.shape}")
    library = load_library()
    if library is None:
        reference.move_slots(kv_caches, source_slots, target_slots)
        return
    addresses = (ctypes.c_void_p * len(kv_caches))(*(kv.data_ptr() for kv in kv_caches))
    shape = _pack_shape(first)
    library.medusa_move_slots(
        addresses,
        len(kv_caches),
        ctypes.addressof(shape),
        source_slots.shape[0],
        source_slots.data_ptr(),
        target_slots.data_ptr(),
    )


def _pack_shape(kv_cache: torch.Tensor) -> _ShapeStruct:
    """Check a KV cache and describe it to the kernels."""
    _, num_kv_heads, block_size, width = kv_cache.shape
    if kv_cache.dtype not in _DTYPES or not kv_cache.is_cpu:
        raise ValueError(
            f"the KV cache must be float32, bfloat16 or float16 on the CPU, not {kv_cache.dtype} "
            f"on {kv_cache.device}"
        )
    if kv_cache.stride()[2:] != (width, 1):
        raise ValueError(
            f"a block of a KV head must be contiguous in the KV cache; strides: {kv_cache.stride()}"
        )
    if block_size % 16 or width % 32 or width > 1024:
        raise ValueError(
            f"block size {block_size} and head size {width // 2} must be multiples of 16, the head "
            "size at most 512"
        )
    return _ShapeStruct(
        dtype=_DTYPES[kv_cache.dtype],
        num_kv_heads=num_kv_heads,
        head_size=width // 2,
        block_size=block_size,
        block_stride=kv_cache.stride(0),
        kv_head_stride=kv_cache.stride(1),
        num_threads=torch.get_num_threads(),
    )


@cache
def load_library() -> ctypes.CDLL | None:
    """The compiled kernels, built if they are not in the cache; None if that is not possible."""
    try:
        path = build()
        # The kernels look for OpenMP among what is visible to all. Torch's is; where there is
        # none, this loads the system's.
        if not hasattr(ctypes.CDLL(None), "GOMP_parallel"):
            ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
    except (OSError, RuntimeError) as error:
        logger.warning(
            "Medusa's tree attention runs without its compiled kernel, 20 times slower: %s\n"
            "It needs a C++ compiler (apt-get install g++, or name one in CXX) and a folder for "
            "what it compiles (XDG_CACHE_HOME).",
            error,
        )
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.medusa_tree_attention.argtypes = (pointer,) * 5 + (ctypes.c_float,)
    library.medusa_move_slots.argtypes = (pointer, integer, pointer, integer, pointer, pointer)
    library.medusa_move_slots.restype = None
    return library


def build() -> Path:
    """Compile the kernels for this CPU unless the cache holds them; returns the shared library.

    The cache is ``$XDG_CACHE_HOME/vllm-medusa``, by default ``~/.cache/vllm-medusa``; the compiler
    is ``$CXX``, by default g++. ``$VLLM_MEDUSA_CXXFLAGS`` is added to the compiler's options.
    Processes may build at the same time.

    Raises:
        OSError: there is no compiler, or the cache cannot be written.
        RuntimeError: the compiler failed; its output is in the message.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    flags = f"{_COMPILE_FLAGS} {os.environ.get('VLLM_MEDUSA_CXXFLAGS', '')}".split()
    identity = "\n".join([_SOURCE.read_text(), *compiler, *flags, _LINK_FLAGS, _cpu()])
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(cache_home) / "vllm-medusa"
    path = folder / f"tree_attention-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    logger.info("Compiling Medusa's tree attention kernel into %s", path)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        compiled, linked = f"{temporary}/kernel.o", f"{temporary}/kernel.so"
        _run([*compiler, *flags, "-c", str(_SOURCE), "-o", compiled])
        _run([*compiler, *_LINK_FLAGS.split(), compiled, "-o", linked])
        os.replace(linked, path)
    return path


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{result.stderr[-2000:]}")


def _cpu() -> str:
    """What -march=native depends on: code built for one CPU may be illegal on another."""
    lines = {platform.machine()}
    with open("/proc/cpuinfo") as cpuinfo:
        for line in cpuinfo:
            if line.startswith(("model name", "flags", "Features", "CPU part")):
                lines.add(line.strip())
    return "\n".join(sorted(lines))


def main() -> int:
    """Build the kernels and say where they are; 1 if that fails."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if load_library() is None:
        return 1
    print(build())
    return 0


if __name__ == "__main__":
    sys.exit(main())
