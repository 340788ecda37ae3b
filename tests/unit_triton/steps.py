"""A step's requests with random queries, keys and values, and what attention must give for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_medusa.attention.triton_tree import TreeBatch, tree_attention
from vllm_medusa.bank import TreeBank
from vllm_medusa.tree import MAX_ROWS, TokenTree

TOLERANCE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    # Weights are rounded for the tensor cores, as FlashAttention does it.
    torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2},
    torch.float16: {"rtol": 2e-3, "atol": 2e-3},
}
UNTOUCHED = 7.0


@dataclass
class Request:
    """Tokens of context, rows of this step, and the tree whose first rows they are, if any."""

    context: int
    rows: int
    tree: TokenTree | None = None

    @property
    def length(self) -> int:
        return self.context + self.rows


def random_tree(rng: np.random.Generator, nodes: int) -> TokenTree:
    """Each node below any of the rows before it."""
    paths: list[tuple[int, ...]] = [()]
    children = [0] * (nodes + 1)
    for _ in range(nodes):
        parent = int(rng.integers(0, len(paths)))
        paths.append((*paths[parent], children[parent]))
        children[parent] += 1
    return TokenTree(tuple(paths[1:]))


def random_request(rng: np.random.Generator, longest: int) -> Request:
    """A whole tree, a cut one, a plain decode with or without a tree of the bank, or a prompt
    chunk."""
    context = int(rng.integers(0, 301))
    rows = int(rng.integers(2, longest))
    kind = rng.choice(["tree", "tree", "cut tree", "decode", "cut to the root", "prompt"])
    if kind == "tree":
        return Request(context, rows, random_tree(rng, rows - 1))
    if kind == "cut tree":
        return Request(context, rows, random_tree(rng, rows + int(rng.integers(0, 20))))
    if kind == "cut to the root":
        return Request(context, 1, random_tree(rng, rows))
    return Request(context, 1 if kind == "decode" else rows)


class Step:
    """The tensors of a step on a device.

    Attributes:
        kv_cache: as vLLM's GPU backends get it, NaN wherever no token of a request is, so that
            reading anything else shows.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        heads: tuple[int, int] = (4, 2),
        head_size: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        heads_first: bool = True,
        nan: bool = True,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_heads, kv_heads = heads
        self.requests, self.dtype, self.scale = list(requests), dtype, head_size**-0.5
        self.block_size = block_size
        blocks = [-(-request.length // block_size) for request in requests]
        order = torch.randperm(sum(blocks), generator=generator, dtype=torch.int32) + 1
        # Wider than needed, as vLLM's; block 0 and every entry behind a request's end are traps.
        table = torch.zeros((len(requests), max(blocks, default=0) + 3), dtype=torch.int32)
        for row, part in zip(table, order.split(blocks), strict=True):
            row[: part.shape[0]] = part

        shape = [sum(blocks) + 1, block_size, kv_heads, 2 * head_size]
        if heads_first:
            shape[1], shape[2] = shape[2], shape[1]
        cache = torch.full(shape, float("nan") if nan else 0.0, dtype=dtype)
        cache = cache if heads_first else cache.transpose(1, 2)
        self.keys, self.values = [], []
        for row, request in zip(table, requests, strict=True):
            keys, values = torch.randn(
                (2, request.length, kv_heads, head_size), generator=generator
            ).to(dtype)
            tokens = torch.arange(request.length)
            places = (row[tokens // block_size].long(), slice(None), tokens % block_size)
            cache[places] = torch.cat([keys, values], dim=-1)
            self.keys.append(keys)
            self.values.append(values)
        self.kv_cache = cache.to(device)
        self.block_table = table.to(device)

        starts = np.cumsum([0, *(request.rows for request in requests)])
        self.query_start_loc_cpu = torch.tensor(starts, dtype=torch.int32)
        self.query_start_loc = self.query_start_loc_cpu.to(device)
        self.seq_lens = torch.tensor(
            [request.length for request in requests], dtype=torch.int32, device=device
        )
        self.query = torch.randn((int(starts[-1]), num_heads, head_size), generator=generator)
        self.query = self.query.to(dtype).to(device)

        trees = list({id(r.tree): r.tree for r in requests if r.tree is not None}.values())
        bank = TreeBank(trees or [TokenTree.chain(1)], device)
        self.ancestors = bank.ancestors
        self.tree_index = torch.tensor(
            [-1 if r.tree is None else [t is r.tree for t in trees].index(True) for r in requests],
            dtype=torch.int32,
            device=device,
        )

    @property
    def max_rows(self) -> int:
        return max(request.rows for request in self.requests if request.rows <= MAX_ROWS)

    def batch(self, **changes: object) -> TreeBatch:
        fields: dict[str, object] = {
            "query_start_loc": self.query_start_loc,
            "seq_lens": self.seq_lens,
            "block_table": self.block_table,
            "tree_index": self.tree_index,
            "ancestors": self.ancestors,
            "max_rows": self.max_rows,
            "max_seq_len": max(request.length for request in self.requests),
        }
        return TreeBatch(**fields | changes)  # type: ignore[arg-type]

    def run(self, **options: object) -> torch.Tensor:
        output = torch.full_like(self.query, UNTOUCHED)
        tree_attention(self.query, self.kv_cache, output, self.batch(), self.scale, **options)
        return output

    def expected(self, with_context: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention and log-sum-exp [heads, tokens] in float64, one row and head at a time."""
        query = self.query.cpu().double()
        output, lse = torch.empty_like(query), torch.empty(query.shape[:2], dtype=torch.float64)
        group = query.shape[1] // self.keys[0].shape[1]
        token = 0
        for request, keys, values in zip(self.requests, self.keys, self.values, strict=True):
            mask = np.tri(request.rows, dtype=bool)
            if request.tree is not None:
                mask = request.tree.ancestor_mask()
            keys, values = keys.double(), values.double()
            for row in range(request.rows):
                own = [request.context + j for j in range(request.rows) if mask[row, j]]
                seen = (list(range(request.context)) if with_context else []) + own
                k = keys[seen].repeat_interleave(group, dim=1)
                v = values[seen].repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,thd->ht", query[token], k) * self.scale
                lse[token] = scores.logsumexp(dim=1)
                output[token] = torch.einsum("ht,thd->hd", scores.softmax(dim=1), v)
                token += 1
        return output, lse.t()

    def check(self, output: torch.Tensor) -> None:
        torch.testing.assert_close(
            output.cpu().double(), self.expected()[0], **TOLERANCE[self.dtype]
        )
