"""The loss: cross-entropy of every head, never with all logits in memory at once.

Logits over a vocabulary are by far the largest tensors of a training step. So the LM head's
product, the softmax and their gradient are computed together, for some rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from vllm_medusa.training.model import IGNORE, TrainableHeads

# Rows whose logits are in memory at once.
CHUNK = 256


def head_loss(
    heads: TrainableHeads,
    head_states: list[torch.Tensor],
    states: torch.Tensor,
    labels: torch.Tensor,
    distill: float,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Cross-entropy of all heads, weighted 0.8^k (Medusa, arXiv 2401.10774, section 2.2.1).

    Args:
        heads: what was trained.
        head_states: of ``TrainableHeads.forward``.
        states: [N, hidden], of the target.
        labels: int64 [N, K], target tokens; ``IGNORE`` behind an answer's end.
        distill: share of the loss that takes the target's probabilities for labels, not its token.
        dtype: in which the LM head's products are computed.

    The target's probabilities for the label of row i and head k come from the state of row i + k.
    """
    total = torch.zeros((), device=states.device)
    # One cast, not one for each chunk.
    shared = heads.lm_head.to(dtype)
    for head, state in enumerate(head_states):
        label = labels[:, head]
        rows = torch.where(label >= 0, heads.row_of[label.clamp(min=0)], IGNORE)
        kept = (label >= 0).nonzero()[:, 0]
        own = heads.own_lm_heads
        loss = _LinearCrossEntropy.apply(
            state[kept].to(dtype),
            shared if own is None else own[head],
            rows[kept],
            states[kept + head + 1] if distill else None,
            shared,
            distill,
        )
        total = total + 0.8**head * loss
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of ``states @ lm_head.T``; the gradient is made on the way forward."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        lm_head: torch.Tensor,
        rows: torch.Tensor,
        soft_states: torch.Tensor | None,
        soft_lm_head: torch.Tensor,
        distill: float,
    ) -> torch.Tensor:
        """Loss of states [N, hidden] for the rows (``IGNORE``: no hard label) of lm_head [V,
        hidden], and for the probabilities that soft_lm_head gives soft_states [N, hidden]."""
        weight = lm_head.to(states.dtype)
        # Every row counts alike in its mean.
        hard_share = (rows >= 0).float() * ((1 - distill) / (rows >= 0).sum().clamp(min=1))
        soft_share = distill / max(1, len(rows))
        grad_states = torch.empty_like(states)
        grad_lm_head = torch.zeros_like(lm_head) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), device=states.device)
        for start in range(0, len(states), CHUNK):
            part = slice(start, start + CHUNK)
            log_p = functional.linear(states[part], weight).float().log_softmax(dim=-1)
            share = hard_share[part, None]
            label = rows[part, None].clamp(min=0)
            loss -= (log_p.gather(1, label) * share).sum()
            soft = None
            if soft_states is not None:
                soft = functional.linear(soft_states[part].to(weight.dtype), soft_lm_head).float()
                soft = soft.softmax(dim=-1).mul_(soft_share)
                loss -= torch.dot(soft.flatten(), log_p.flatten())
            # In place from here on: these are the largest tensors there are.
            grad = log_p.exp_().mul_(share + soft_share)
            grad.scatter_add_(1, label, -share)
            if soft is not None:
                grad.sub_(soft)
            grad = grad.to(states.dtype)
            grad_states[part] = grad @ weight
            if grad_lm_head is not None:
                grad_lm_head += grad.T @ states[part]
        ctx.save_for_backward(grad_states, grad_lm_head)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_states, grad_lm_head = ctx.saved_tensors
        if grad_lm_head is not None:
            grad_lm_head = grad_lm_head * grad
        return grad_states * grad, grad_lm_head, None, None, None, None
