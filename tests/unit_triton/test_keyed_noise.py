"""Noise that is a function of seed, position and purpose; and drawn drafts by such noise."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.integration.distribution import chance_of
from vllm_medusa.acceptance import NO_TOKEN
from vllm_medusa.keyed_noise import keyed_exponential, keyed_uniform
from vllm_medusa.sampled_drafts import DraftProbs, draw_distinct


def seeds_of(number, device, start=0):
    generator = torch.Generator().manual_seed(start)
    return torch.randint(-(2**63), 2**63 - 1, (number,), generator=generator).to(device)


def positions_of(number, device):
    return (torch.arange(number) % 977).int().to(device)


def test_is_uniform_and_nothing_is_alike(device):
    seeds, positions = seeds_of(6, device), torch.full((6,), 5, device=device)
    noise = [keyed_uniform(seeds, positions, stream, 3000).cpu() for stream in (0, 1)]
    noise.append(keyed_uniform(seeds, positions + 1, 0, 3000).cpu())
    # The same low or high half of a seed is another seed.
    for other in (seeds ^ 1, seeds ^ (1 << 40)):
        noise.append(keyed_uniform(other, positions, 0, 3000).cpu())
    rows = torch.cat(noise)
    assert rows.min() >= 0 and rows.max() < 1
    counts = torch.histc(rows, bins=100, min=0, max=1).double()
    assert chance_of(counts, torch.full_like(counts, rows.numel() / 100)) > 1e-4
    likeness = torch.corrcoef(rows) - torch.eye(len(rows))
    assert likeness.abs().max() < 6 / 3000**0.5
    # As often as asked, and in any company.
    again = keyed_uniform(seeds[3:4], positions[3:4], 1, 1500).cpu()
    assert torch.equal(again[0], noise[1][3, :1500])


def test_exponential(device):
    noise = keyed_exponential(seeds_of(20, device), positions_of(20, device), 3, 1000).cpu()
    assert noise.min() >= 0 and noise.isfinite().all()
    counts = torch.histc((-noise).exp(), bins=50, min=0, max=1).double()
    assert chance_of(counts, torch.full_like(counts, noise.numel() / 50)) > 1e-4


NUM_ROWS = 1000
TARGET = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05])
DRAFT = torch.tensor([0.35, 0.2, 0.3, 0.1, 0.05])


@pytest.mark.parametrize(
    ("number", "stream"), [(1, "drafts"), (2, "drafts"), (4, "drafts"), (4, "chances")]
)
def test_what_comes_out_is_the_target(number, stream, device):
    """A row a request. If drafts and chances have the same noise, that is found."""
    from vllm_medusa.runner.draft_rules import CHANCES, DrawnDraftsRule

    seeds, positions = seeds_of(NUM_ROWS, device), positions_of(NUM_ROWS, device)
    order = DRAFT.argsort(descending=True).to(device)
    probs = DRAFT.to(device)[order].expand(NUM_ROWS, -1)
    tokens = order.expand(NUM_ROWS, -1)
    own = 1 if stream == "drafts" else CHANCES
    noise = keyed_exponential(seeds, positions, own, probs.shape[1])
    children = tokens.gather(1, draw_distinct(probs, number, noise))

    def on_device(values):
        return SimpleNamespace(gpu=values, np=values.cpu().numpy())

    states = SimpleNamespace(
        seeds=on_device(seeds), temperature=on_device(torch.ones(NUM_ROWS, device=device))
    )
    sampler = SimpleNamespace(
        sampling_states=states,
        use_fp64_gumbel=False,
        use_flashinfer=True,
        req_states=SimpleNamespace(max_num_reqs=NUM_ROWS),
    )
    state = SimpleNamespace(
        drawn_from=DraftProbs(probs[:, None], tokens[:, None]),
        has_drawn=np.arange(NUM_ROWS) % 10 != 0,
    )
    slots = torch.arange(NUM_ROWS, device=device)
    rule = DrawnDraftsRule(sampler, state)
    rule.look_at(
        SimpleNamespace(
            idx_mapping=slots,
            idx_mapping_np=np.arange(NUM_ROWS),
            is_prefilling_np=np.arange(NUM_ROWS) % 10 == 1,
        )
    )
    assert not sampler.use_flashinfer
    never = torch.full_like(slots, 4)
    logits = TARGET.to(device).log().expand(NUM_ROWS, -1)
    chosen = rule.apply(never, logits, children, slots, torch.zeros_like(slots), positions).cpu()
    place = torch.arange(NUM_ROWS) % 10
    assert (chosen[place < 2] == 4).all()  # drafts of others were not drawn
    counts = torch.bincount(chosen[place >= 2], minlength=5).double()
    chance = chance_of(counts, TARGET.double() * counts.sum())
    print(f"{number} children, noise of {stream}: p = {chance:.3g}")
    assert (chance > 1e-4) == (stream == "drafts")

    none = torch.full_like(children, NO_TOKEN)
    assert (rule.apply(never, logits, none, slots, slots * 0, positions) == 4).all()
