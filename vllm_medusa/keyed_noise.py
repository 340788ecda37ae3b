"""Random numbers that are a function of a request's seed and of what they are for.

As vLLM's V2 model runner draws tokens: no generator has a state, so the numbers are the same on all
ranks and in every order of requests, and nothing waits for the device. vLLM hashes seed, position
and token for its own draws; here Triton's Philox is used, so that the two have nothing in common.
"""

import torch
from vllm.triton_utils import tl, triton

BLOCK = 1024


# Not compiled anew for numbers that are 1 or multiples of 16.
@triton.jit(do_not_specialize=["stream", "count", "total"])
def _uniform_kernel(
    noise_ptr,  # [B, count]
    seeds_ptr,  # [B]
    positions_ptr,  # [B]
    stream,
    count,
    total,  # B * count
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    request, number = place // count, place % count
    seed = tl.load(seeds_ptr + request, mask=inside, other=0)
    position = tl.load(positions_ptr + request, mask=inside, other=0).to(tl.int32)
    zeros = number * 0
    bits, _, _, _ = tl.philox(seed, number, position, zeros + stream, zeros)
    tl.store(noise_ptr + place, tl.uint_to_uniform_float(bits), mask=inside)


def keyed_uniform(
    seeds: torch.Tensor, positions: torch.Tensor, stream: int, count: int
) -> torch.Tensor:
    """Uniform noise in [0, 1), float32 [B, count].

    Args:
        seeds: int64 [B].
        positions: integers [B], of tokens in their requests.
        stream: tells apart what the numbers are for.
        count: how many for each.
    """
    noise = torch.empty(seeds.shape[0], count, dtype=torch.float32, device=seeds.device)
    if noise.numel():
        _uniform_kernel[(triton.cdiv(noise.numel(), BLOCK),)](
            noise,
            seeds.contiguous(),
            positions.contiguous(),
            stream,
            count,
            noise.numel(),
            BLOCK=BLOCK,
        )
    return noise


def keyed_exponential(
    seeds: torch.Tensor, positions: torch.Tensor, stream: int, count: int
) -> torch.Tensor:
    """Likewise, exponential noise."""
    return -torch.log1p(-keyed_uniform(seeds, positions, stream, count))
