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
# What drafts were drawn from differs from row to row, and from slot to slot.
DRAFTS = torch.tensor(
    [
        [[0.35, 0.2, 0.3, 0.1, 0.05], [0.05, 0.1, 0.2, 0.3, 0.35], [0.9, 0.02, 0.03, 0.02, 0.03]],
        [[0.1, 0.6, 0.1, 0.1, 0.1], [0.5, 0.1, 0.1, 0.25, 0.05], [0.05, 0.05, 0.1, 0.1, 0.7]],
    ]
)
FAULTS = ["drafts and chances from the same noise", "another row's", "another slot's"]


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_what_comes_out_is_the_target(fault, device):
    """A request a row: the rule of drawn drafts with keyed noise."""
    from vllm_medusa.runner.draft_rules import CHANCES, DrawnDraftsRule, DrawnRows

    slots = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(4)).to(device)
    seeds, positions = seeds_of(NUM_ROWS, device), positions_of(NUM_ROWS, device)
    rows = (torch.arange(NUM_ROWS) % 7 % 3).to(device)
    drafts = DRAFTS.to(device).repeat(NUM_ROWS // 2, 1, 1)
    if fault == FAULTS[0]:  # the same everywhere, else the fault averages out
        drafts = drafts[:1, :1].expand_as(drafts)
    probs, tokens = drafts.sort(dim=-1, descending=True)
    drawn_from = DraftProbs(probs, tokens)
    stream = CHANCES if fault == FAULTS[0] else 1
    noise = keyed_exponential(seeds[slots], positions, stream, probs.shape[-1])
    drawn = draw_distinct(probs[slots, rows], 4, noise)
    children = tokens[slots, rows].gather(1, drawn)
    if fault == "another row's":
        drawn_from = DraftProbs(*(values.roll(1, dims=1) for values in drawn_from))
    if fault == "another slot's":
        drawn_from = DraftProbs(*(values.roll(1, dims=0) for values in drawn_from))

    ones = torch.ones(NUM_ROWS, device=device)
    sampler = SimpleNamespace(
        sampling_states=SimpleNamespace(
            seeds=SimpleNamespace(gpu=seeds), temperature=SimpleNamespace(gpu=ones)
        ),
        use_fp64_gumbel=False,
    )
    rule = DrawnDraftsRule(sampler, SimpleNamespace(drawn_from=drawn_from))
    never = torch.full_like(slots, 4)
    logits = TARGET.to(device).log().expand(NUM_ROWS, -1)
    at = DrawnRows(never, logits, children, slots, rows, positions)
    chosen = rule.choose(at).cpu()
    counts = torch.bincount(chosen, minlength=5).double()
    chance = chance_of(counts, TARGET.double() * counts.sum())
    print(f"{fault}: p = {chance:.3g}")
    assert (chance > 1e-4) == (fault is None)

    childless = at._replace(children=torch.full_like(children, NO_TOKEN))
    assert (rule.choose(DrawnRows(*(values[:3] for values in childless))) == 4).all()


def test_who_the_rule_is_for():
    from vllm_medusa.runner.draft_rules import DrawnDraftsRule

    state = SimpleNamespace(has_drawn=np.array([True, False, True, True]))
    batch = SimpleNamespace(
        idx_mapping_np=np.array([3, 1, 0]), is_prefilling_np=np.array([False, False, True])
    )
    rule = DrawnDraftsRule(SimpleNamespace(), state)
    # The last one's places for nodes hold what nobody drew.
    assert rule.is_for(batch).tolist() == [True, False, False]
