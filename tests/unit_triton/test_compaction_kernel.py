"""Moving accepted paths in one launch gives what moving them slot by slot gives."""

import pytest
import torch

from vllm_medusa.acceptance import NO_TOKEN, AcceptedPaths
from vllm_medusa.compaction import accepted_moves
from vllm_medusa.compaction_kernel import SlotMover

BLOCK_SIZE = 16


def caches(layers, dtype, head_size, heads_first):
    """Caches with every element another number; the two orders in memory that vLLM has."""
    made = []
    for layer in range(layers):
        torch.manual_seed(layer)
        if heads_first:
            made.append(torch.randn(9, 2, BLOCK_SIZE, 2 * head_size).to(dtype))
        else:
            made.append(torch.randn(9, BLOCK_SIZE, 2, 2 * head_size).to(dtype).transpose(1, 2))
    return made


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 80, 96])
def test_equals_single_moves(head_size, dtype, heads_first, device):
    expected = caches(3, dtype, head_size, heads_first)
    found = [cache.clone().to(device) for cache in expected]
    # Three requests whose rows lie across the borders of scattered blocks; one keeps nothing.
    slots = torch.cat(
        [
            torch.arange(3 * BLOCK_SIZE - 4, 3 * BLOCK_SIZE),
            torch.arange(6 * BLOCK_SIZE, 6 * BLOCK_SIZE + 8),
            torch.arange(BLOCK_SIZE + 2, BLOCK_SIZE + 8),
            torch.arange(8 * BLOCK_SIZE - 5, 8 * BLOCK_SIZE),
        ]
    )
    first_rows = torch.tensor([0, 12, 18])
    paths = AcceptedPaths(
        tokens=torch.tensor([[7, 7, 7, 7], [7, NO_TOKEN, NO_TOKEN, NO_TOKEN], [7, 7, 7, NO_TOKEN]]),
        rows=torch.tensor([[0, 2, 5, 11], [0, 0, 0, 0], [0, 1, 4, 4]]),
    )
    on_device = AcceptedPaths(*(tensor.to(device) for tensor in paths))
    SlotMover(found).move(on_device, slots.to(device), first_rows.to(device))

    source, target = accepted_moves(paths, slots, first_rows)
    assert len(source) == 4
    for cache in expected:
        for here, there in zip(source.tolist(), target.tolist(), strict=True):
            cache[there // BLOCK_SIZE, :, there % BLOCK_SIZE] = cache[
                here // BLOCK_SIZE, :, here % BLOCK_SIZE
            ].clone()
    for cache, should in zip(found, expected, strict=True):
        assert torch.equal(cache.cpu(), should)


def test_layers_of_different_layouts_are_refused():
    one, two = caches(1, torch.float32, 64, True)[0], caches(1, torch.float32, 32, True)[0]
    with pytest.raises(ValueError, match="same KV cache layout in all layers"):
        SlotMover([one, two])
