"""The heads as they are trained: the target frozen, each head a stack of residual blocks.

Block 0 of a sequential head reads the target's state and the embeddings of the tokens on the path,
the root's first (Hydra, arXiv 2402.05109); of a plain head the state alone (Medusa, arXiv
2401.10774, section 2.1). All blocks start at zero: a head starts as the LM head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from vllm_medusa.heads.checkpoint import HeadsInfo, HeadsWeights
from vllm_medusa.training.data import DataError

IGNORE = -100


@dataclass(frozen=True)
class HeadsSpec:
    """What kind of heads.

    Attributes:
        head_type: "plain" or "sequential".
        num_heads: K.
        num_layers: residual blocks per head, from 1 on.
        own_lm_heads: each head trains an LM head of its own; else all share the target's, frozen.
        draft_vocab: the most frequent so many tokens of the answers can be drafted; None: all.
    """

    head_type: str = "sequential"
    num_heads: int = 4
    num_layers: int = 1
    own_lm_heads: bool = False
    draft_vocab: int | None = 16384


@dataclass(frozen=True)
class TargetMatrices:
    """What heads take from the target, float32: both [vocabulary, hidden]."""

    lm_head: torch.Tensor
    embeddings: torch.Tensor

    @classmethod
    def read(cls, model: str) -> TargetMatrices:
        """Load a target and keep its two matrices.

        Raises:
            DataError: its LM head has a bias, which heads that share it could not have.
        """
        from transformers import AutoModelForCausalLM

        target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        lm_head = target.get_output_embeddings()
        if getattr(lm_head, "bias", None) is not None:
            raise DataError(f"{model}: heads for an LM head with a bias cannot be trained")
        return cls(lm_head.weight.data, target.get_input_embeddings().weight.data)


def check_start(info: HeadsInfo, spec: HeadsSpec, hidden_size: int) -> None:
    """Refuse stored heads that cannot be a start for heads of a kind.

    Raises:
        DataError: they are of another kind, or have more blocks.
    """
    mine = (spec.head_type == "sequential", spec.num_heads, hidden_size)
    theirs = (info.is_sequential, info.num_heads, info.hidden_size)
    if mine != theirs or info.num_layers > spec.num_layers:
        raise DataError(
            f"heads {info.source} cannot be a start for these: (sequential, number, hidden "
            f"size) is {theirs} there and {mine} here, layers {info.num_layers} there and "
            f"{spec.num_layers} here"
        )


class TrainableHeads(nn.Module):
    """K heads on given matrices of the target.

    Attributes:
        token_map: int64 [V], the token ids of the draft vocabulary; None: all.
    """

    def __init__(
        self,
        spec: HeadsSpec,
        target: TargetMatrices,
        token_map: torch.Tensor | None,
        embedding_scale: float = 1.0,
    ) -> None:
        """``embedding_scale``: what brings embeddings to the size of states, so that one learning
        rate fits the weights of both; it goes into the weights that are stored."""
        super().__init__()
        self.spec = spec
        self.token_map = token_map
        self.embedding_scale = embedding_scale
        hidden = target.lm_head.shape[1]
        self.heads = nn.ModuleList()
        for number in range(1, spec.num_heads + 1):
            inputs = hidden * (1 + number) if self.is_sequential else hidden
            sizes = ([inputs] + [hidden] * spec.num_layers)[: spec.num_layers]
            self.heads.append(nn.ModuleList(nn.Linear(size, hidden) for size in sizes))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        rows = target.lm_head if token_map is None else target.lm_head[token_map]
        self.register_buffer("lm_head", rows, persistent=False)
        self.register_buffer("embeddings", target.embeddings, persistent=False)
        # Target token -> row of the draft vocabulary.
        row_of = torch.arange(target.lm_head.shape[0])
        if token_map is not None:
            row_of = torch.full_like(row_of, IGNORE)
            row_of[token_map] = torch.arange(len(token_map))
        self.register_buffer("row_of", row_of, persistent=False)
        self.own_lm_heads = None
        if spec.own_lm_heads:
            self.own_lm_heads = nn.ParameterList(
                nn.Parameter(rows.clone()) for _ in range(spec.num_heads)
            )

    @property
    def is_sequential(self) -> bool:
        return self.spec.head_type == "sequential"

    def forward(self, states: torch.Tensor, paths: torch.Tensor) -> list[torch.Tensor]:
        """What the LM head of every head reads.

        Args:
            states: [N, hidden], what the target's LM head reads.
            paths: int64 [N, K], the token drawn from each state (the root) and those behind it.

        Returns:
            K tensors [N, hidden].
        """
        embeddings = None
        if self.is_sequential:
            embeddings = self.embedding_scale * functional.embedding(paths, self.embeddings)
        found = []
        for head, blocks in enumerate(self.heads):
            state = states
            for layer, block in enumerate(blocks):
                inputs = state
                if layer == 0 and embeddings is not None:
                    inputs = torch.cat([states, embeddings[:, : head + 1].flatten(1)], dim=1)
                state = state + functional.silu(block(inputs))
            found.append(state)
        return found

    def logits(self, states: torch.Tensor, paths: torch.Tensor) -> list[torch.Tensor]:
        """Logits of every head over the draft vocabulary, K tensors [N, V]; see ``forward``."""
        own = self.own_lm_heads
        return [
            functional.linear(state, self.lm_head if own is None else own[head])
            for head, state in enumerate(self(states, paths))
        ]

    def weights(self, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """The trained tensors as ``save_heads`` takes them (see ``HeadsWeights``)."""
        hidden = self.lm_head.shape[1]
        blocks, biases, paths = [], [], []
        for head in self.heads:
            first = head[0].weight.data
            blocks.append([first[:, :hidden], *(block.weight.data for block in head[1:])])
            biases.append([block.bias.data for block in head])
            paths.append((first[:, hidden:] * self.embedding_scale).to("cpu", dtype))
        own = self.own_lm_heads
        return {
            "block_weight": torch.stack([torch.stack(each) for each in blocks]).to("cpu", dtype),
            "block_bias": torch.stack([torch.stack(each) for each in biases]).to("cpu", dtype),
            "path_weight": paths if self.is_sequential else None,
            "lm_head": None if own is None else torch.stack([*own]).data.to("cpu", dtype),
            "token_map": self.token_map,
        }

    @classmethod
    def from_weights(cls, stored: HeadsWeights, target: TargetMatrices) -> TrainableHeads:
        """Stored heads, of any format, for evaluation on the target."""
        info = stored.info
        spec = HeadsSpec(
            "sequential" if info.is_sequential else "plain",
            info.num_heads,
            info.num_layers,
            info.own_lm_heads,
        )
        heads = cls(spec, target, stored.token_map)
        heads.copy_blocks(stored)
        if stored.lm_head is not None:
            assert heads.own_lm_heads is not None
            for number, own in enumerate(heads.own_lm_heads):
                own.data.copy_(stored.lm_head[number if len(stored.lm_head) > 1 else 0])
        return heads

    @torch.no_grad()
    def copy_blocks(self, stored: HeadsWeights) -> None:
        """Take over the residual blocks of stored heads; blocks that these have besides stay zero,
        which leaves what the heads say as it was.

        Raises:
            DataError: the stored heads are of another kind, or have other or more blocks.
        """
        info = stored.info
        check_start(info, self.spec, self.lm_head.shape[1])
        for number, head in enumerate(self.heads):
            for layer in range(info.num_layers):
                weight = stored.block_weight[number, layer]
                if layer == 0 and stored.path_weight is not None:
                    path = stored.path_weight[number] / self.embedding_scale
                    weight = torch.cat([weight, path], dim=1)
                head[layer].weight.copy_(weight)
                if stored.block_bias is not None:
                    head[layer].bias.copy_(stored.block_bias[number, layer])
