"""Sequential heads in the engine: what they draft, for whole batches and trees cut short."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.generation import generate, medusa, runner_of, tokens
from tests.integration.tiny import HIDDEN, VOCAB
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.heads.save import save_heads
from vllm_medusa.training.model import TargetMatrices, TrainableHeads
from vllm_medusa.tree import TokenTree

TREE = [[0], [1], [0, 0], [2], [0, 1], [1, 0], [0, 0, 0], [0, 1, 1], [2, 0], [0, 0, 0, 0]]


def make_sequential_heads(
    folder,
    num_layers=1,
    own_lm_heads=False,
    token_map=None,
    bias=True,
    vocab_size=VOCAB,
    scale=0.25,
):
    generator = torch.Generator().manual_seed(num_layers)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * scale

    save_heads(
        folder,
        "medusa-v0.1" if own_lm_heads else "medusa-2",
        block_weight=random(4, num_layers, HIDDEN, HIDDEN),
        block_bias=random(4, num_layers, HIDDEN) if bias else None,
        path_weight=[random(HIDDEN, number * HIDDEN) for number in range(1, 5)],
        lm_head=random(4, vocab_size, HIDDEN) if own_lm_heads else None,
        token_map=token_map,
        config={"vocab_size": vocab_size},
    )
    return folder


KINDS = {
    "one block": {},
    "two blocks": {"num_layers": 2},
    "own LM heads": {"own_lm_heads": True},
    "draft vocabulary": {"token_map": torch.arange(3, VOCAB, 2)},
    "without bias": {"bias": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_what_the_trained_heads_say(kind, models, engine, tmp_path):
    """Every node of every tree size, against the module that training uses, path by path."""
    model = models()
    folder = make_sequential_heads(tmp_path / "heads", **KINDS[kind])
    drafter = runner_of(engine(model, **medusa(folder, TREE))).drafter
    target = TargetMatrices.read(str(model))
    trained = TrainableHeads.from_weights(load_heads(folder), target)
    ids = torch.arange(VOCAB) if trained.token_map is None else trained.token_map

    torch.manual_seed(0)
    states, roots = torch.randn(3, HIDDEN), torch.tensor([5, 200, 77])
    for num_nodes in (1, 3, 4, 10):
        drafted = drafter.propose(states, roots, num_nodes)
        paths = TokenTree.from_paths(TREE).prefix(num_nodes).paths
        token_of = [dict(zip(paths, row, strict=True)) for row in drafted.tolist()]
        for request, known in enumerate(token_of):
            for path in paths:
                behind = [int(roots[request])]
                behind += [known[path[:depth]] for depth in range(1, len(path))]
                padded = torch.tensor([(behind + [0] * 4)[:4]])
                with torch.no_grad():
                    logits = trained.logits(states[request : request + 1], padded)[len(path) - 1][0]
                assert known[path] == ids[logits.argsort(descending=True)[path[-1]]]


def test_text_is_that_of_the_target(models, engine, reference, tmp_path):
    model = models()
    folder = make_sequential_heads(tmp_path / "heads")
    prompts = [[1, 3 + n, 9, 40 + n] for n in range(6)]
    found = tokens(generate(engine(model, **medusa(folder, TREE)), prompts))
    assert found == tokens(reference(model, prompts))


def test_the_embeddings_are_the_targets(models, engine, tmp_path):
    model = models()
    drafter = runner_of(
        engine(model, **medusa(make_sequential_heads(tmp_path / "heads"), TREE))
    ).drafter
    wanted = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight[[3, 250]]
    found = drafter.heads._target[0].embed_input_ids(torch.tensor([3, 250]))
    assert torch.equal(found, wanted)
