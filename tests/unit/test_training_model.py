"""The trainable heads: what they start as, what they read, how they are stored and judged."""

import itertools

import numpy as np
import pytest
import torch

from vllm_medusa.calibration.ranks_file import MISS
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.save import save_heads
from vllm_medusa.training import loss
from vllm_medusa.training.answers import Answer
from vllm_medusa.training.batches import make_batch
from vllm_medusa.training.evaluate import accuracy_by_rank, rank_paths
from vllm_medusa.training.model import (
    IGNORE,
    HeadsSpec,
    TargetMatrices,
    TrainableHeads,
)
from vllm_medusa.training.trainer import (
    TrainOptions,
    frequent_tokens,
    learning_rate,
    load_heads_file,
    save_heads_file,
)

HIDDEN, VOCAB = 8, 30
KINDS = [("plain", 1), ("plain", 2), ("sequential", 1), ("sequential", 2)]


@pytest.fixture
def target():
    generator = torch.Generator().manual_seed(0)
    return TargetMatrices(
        torch.randn(VOCAB, HIDDEN, generator=generator),
        torch.randn(VOCAB, HIDDEN, generator=generator),
    )


def random_heads(target, head_type="sequential", layers=1, token_map=None, **more):
    torch.manual_seed(1)
    heads = TrainableHeads(HeadsSpec(head_type, 3, layers, **more), target, token_map, 2.5)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return heads


def items(*lengths):
    torch.manual_seed(2)
    return [
        (torch.randn(n, HIDDEN), Answer(n, 0, [1], torch.randint(VOCAB, (n,)).tolist(), 0.0))
        for n in lengths
    ]


@pytest.mark.parametrize(("head_type", "layers"), KINDS)
def test_a_new_head_is_the_lm_head(target, head_type, layers):
    heads = TrainableHeads(HeadsSpec(head_type, 3, layers), target, None)
    states = torch.randn(5, HIDDEN)
    for logits in heads.logits(states, torch.zeros(5, 3, dtype=torch.long)):
        torch.testing.assert_close(logits, states @ target.lm_head.T)


def test_a_batch_pairs_states_with_what_came_behind():
    batch = make_batch([(torch.zeros(3, HIDDEN), Answer(1, 0, [9], [5, 6, 7], 0.0))], 2)
    assert batch.paths.tolist() == [[5, 6], [6, 7], [7, 0]]
    assert batch.labels.tolist() == [[6, 7], [7, IGNORE], [IGNORE, IGNORE]]


def test_sequential_heads_read_the_path_to_their_guess_and_no_further(target):
    heads = random_heads(target)
    states = torch.randn(1, HIDDEN)
    first = heads.logits(states, torch.tensor([[3, 4, 5]]))
    for changed, alike in (([4, 4, 5], 0), ([3, 9, 5], 1), ([3, 4, 9], 2)):
        second = heads.logits(states, torch.tensor([changed]))
        same = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
        assert same == [head < alike for head in range(3)]


@pytest.mark.parametrize(("head_type", "layers"), KINDS)
@pytest.mark.parametrize("own", [False, True])
def test_stored_heads_compute_the_same(target, tmp_path, head_type, layers, own):
    token_map = torch.arange(0, VOCAB, 2)
    heads = random_heads(target, head_type, layers, token_map, own_lm_heads=own)
    fmt = "medusa-v0.1" if own else "medusa-2"
    save_heads(tmp_path / "heads", fmt, config={"vocab_size": VOCAB}, **heads.weights())
    again = TrainableHeads.from_weights(load_heads(tmp_path / "heads"), target)
    states, paths = torch.randn(4, HIDDEN), torch.randint(VOCAB, (4, 3))
    for first, second in zip(heads.logits(states, paths), again.logits(states, paths), strict=True):
        torch.testing.assert_close(first, second)


def test_the_best_heads_are_read_back(target, tmp_path):
    heads = random_heads(target, token_map=torch.arange(9))
    save_heads_file(heads, tmp_path / "best.safetensors")
    again = load_heads_file(tmp_path / "best.safetensors", heads.spec, target)
    states, paths = torch.randn(4, HIDDEN), torch.randint(VOCAB, (4, 3))
    assert all(map(torch.equal, heads.logits(states, paths), again.logits(states, paths)))


def reference_loss(heads, target, answers, distill):
    """Written out: row i of an answer is to say what stands head + 1 places behind it."""
    total = 0.0
    for head in range(3):
        hard, soft = [], []
        for states, answer in answers:
            batch = make_batch([(states, answer)], 3)
            said = heads.logits(batch.states, batch.paths)[head].log_softmax(-1)
            for row in range(len(states) - head - 1):
                column = heads.row_of[answer.answer[row + head + 1]]
                if column >= 0:
                    hard.append(-said[row, column])
                wanted = (heads.lm_head @ states[row + head + 1]).softmax(0)
                soft.append(-(wanted * said[row]).sum())
        loss = (1 - distill) * torch.stack(hard).mean() + distill * torch.stack(soft).mean()
        total = total + 0.8**head * loss
    return total


@pytest.mark.parametrize("distill", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("own", [False, True])
def test_loss_and_gradient_are_those_of_plain_cross_entropy(target, distill, own, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK", 4)
    heads = random_heads(target, token_map=torch.arange(0, VOCAB, 2), own_lm_heads=own)
    answers = items(9, 4)
    wanted = reference_loss(heads, target, answers, distill)
    wanted.backward()
    gradients = [parameter.grad.clone() for parameter in heads.parameters()]
    heads.zero_grad()
    batch = make_batch(answers, 3)
    states = heads(batch.states, batch.paths)
    found = loss.head_loss(heads, states, batch.states, batch.labels, distill)
    (3 * found).backward()
    torch.testing.assert_close(found, wanted)
    for parameter, gradient in zip(heads.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, 3 * gradient)


def test_rank_paths_are_those_of_a_plain_loop(target):
    token_map = torch.arange(1, VOCAB, 2)
    heads = random_heads(target, token_map=token_map)
    answers = items(7, 1, 4)
    found = rank_paths(heads, answers)
    assert [len(path) for path in found] == [6, 0, 3]
    for (states, answer), path in zip(answers, found, strict=True):
        for row in range(len(path)):
            for head in range(3):
                place = row + head + 1
                wanted = MISS
                if place < len(answer.answer):
                    known = [*answer.answer[row : row + 3], 0, 0][:3]
                    logits = heads.logits(states[row : row + 1], torch.tensor([known]))[head][0]
                    order = token_map[logits.argsort(descending=True)[:10]].tolist()
                    if answer.answer[place] in order:
                        wanted = order.index(answer.answer[place])
                assert path[row, head] == wanted


def test_accuracy_counts_only_positions_with_something_to_guess():
    path = np.array([[0, 1], [1, 0], [0, MISS]], dtype=np.uint8)
    table = accuracy_by_rank([path])
    assert table[0][:2] == pytest.approx([2 / 3, 1])
    assert table[1][:2] == pytest.approx([1 / 2, 1])


def test_the_draft_vocabulary_is_what_answers_use_most():
    answers = [(torch.empty(0), Answer(1, 0, [0], [7, 7, 3, 3, 3, 9], 0.0))]
    assert frequent_tokens(answers, 2, VOCAB).tolist() == [3, 7]
    assert frequent_tokens(answers, None, VOCAB) is None
    assert frequent_tokens(answers, VOCAB, VOCAB) is None


def test_the_learning_rate_warms_up_and_falls_to_nothing():
    options = TrainOptions(warmup=0.1)
    rates = [learning_rate(step, 100, options) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    assert rates[100] == pytest.approx(0)
