"""Drafts that are drawn from the heads: the output has the target's distribution all the same."""

import numpy as np
import pytest
import torch
from vllm.sampling_params import StructuredOutputsParams

from tests.integration.certain import differences, generate_certain, plain_and_medusa
from tests.integration.distribution import (
    LIVELY,
    PROMPT,
    SMALL_VOCAB,
    chi_square,
    chi_square_of_each,
    exact_distribution,
    exact_logits,
)
from tests.integration.generation import (
    SMALL_BUSHY,
    continuations,
    fewer,
    generate,
    make_prompts,
    medusa,
    runner_of,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.test_sequential import make_sequential_heads
from tests.integration.tiny import HIDDEN, VOCAB, save_heads
from tests.integration.watch import watching
from tests.triton_interpreter import ENABLED as INTERPRETED
from vllm_medusa import sampled_drafts
from vllm_medusa.heads.checkpoint import load_heads
from vllm_medusa.runner import draft_rules, draft_sampler
from vllm_medusa.sampled_drafts import DraftProbs, DraftSampling, exponential
from vllm_medusa.training.model import TargetMatrices, TrainableHeads

DRAWN = {"draft_sample_method": "probabilistic"}

# -- the distribution ------------------------------------------------------------------------------

NUM_SAMPLES = 100 if INTERPRETED else 5000
SETTINGS = {
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1": {"temperature": 1.0},
    "temperature 1.5": {"temperature": 1.5},
    "top-k, top-p": {"temperature": 1.0, "top_k": 9, "top_p": 0.85},
}
if INTERPRETED:  # one row at a time
    SETTINGS = {name: SETTINGS[name] for name in ("temperature 1", "top-k, top-p")}
# Trees by the number of children that every node has down to some depth.
TREES = {
    1: [[0], [0, 0], [0, 0, 0]],
    2: [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1], [0, 0, 0], [0, 0, 1]],
    # Ranks are no more than an order here.
    4: [[r] for r in (0, 2, 5, 1)] + [[a, b] for a in (0, 2, 5, 1) for b in (3, 0, 1, 2)],
}
KINDS = [("sequential", 2), ("plain", 4), ("plain", 1), ("plain", 2)][: 2 if INTERPRETED else 4]


@pytest.fixture(scope="module")
def small_model(models):
    return models("llama", **LIVELY)


@pytest.fixture(scope="module")
def lively_heads(tmp_path_factory):
    """Heads that are not too sure of what they guess."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for head in range(3):
        weight = torch.randn(HIDDEN, HIDDEN, generator=generator) / 20
        tensors[f"{head}.0.linear.weight"] = weight
        tensors[f"{head}.0.linear.bias"] = torch.randn(HIDDEN, generator=generator) / 2
    config = {"version": "2", "medusa_num_heads": 3, "medusa_num_layers": 1}
    return {
        "plain": save_heads(tmp_path_factory.mktemp("plain"), tensors, **config),
        "sequential": make_sequential_heads(
            tmp_path_factory.mktemp("sequential"),
            token_map=torch.tensor([1, 2, 3, 5, 6, 7, 9, 10, 11, 12, 14]),
            vocab_size=SMALL_VOCAB,
            scale=0.05,
        ),
    }


@pytest.fixture(scope="module")
def engine_of(small_model, lively_heads, module_engine):
    def start(kind, children, schedule=None, **options):
        # Chains from the text are fixed drafts, beside those that are drawn; and "auto" draws those
        # of some requests only.
        how = {} if children == 4 else DRAWN
        if schedule:
            how = how | {"num_speculative_tokens_per_batch_size": schedule}
        config = medusa(lively_heads[kind], TREES[children], lookup=children == 2, **how)
        options = {"max_num_seqs": 512, "max_num_batched_tokens": 16384} | options
        return module_engine(
            small_model,
            **config,
            **options,
            max_model_len=32,
            block_size=32,
            num_gpu_blocks_override=600,
        )

    return start


def draw(llm, number=NUM_SAMPLES, each=NUM_SAMPLES // 20):
    """Texts of all settings, which stand in the same batches."""
    torch.manual_seed(1)
    np.random.seed(1)  # V2 draws from it the seeds of requests that have none
    params = [{**setting, "n": each, "max_tokens": 4} for setting in SETTINGS.values()]
    turns = number // each
    with watching() as watch:
        outputs = generate(llm, [PROMPT] * len(params) * turns, params * turns)
    texts = {name: [] for name in SETTINGS}
    for name, output in zip(list(SETTINGS) * turns, outputs, strict=True):
        texts[name] += [list(one.token_ids) for one in output.outputs]
    return texts, watch


@pytest.fixture(scope="module")
def expected(small_model):
    logits = exact_logits(small_model)
    return {name: exact_distribution(logits, setting) for name, setting in SETTINGS.items()}


@pytest.mark.parametrize(("kind", "children"), KINDS)
def test_distribution(kind, children, engine_of, expected):
    texts, watch = draw(engine_of(kind, children))
    steps = sum(watch.lengths.values())
    shares = {length: count / steps for length, count in sorted(watch.lengths.items())}
    print(f"{kind}, {children} children: {shares}")
    assert watch.lengths[1] > 0.1 * steps and watch.lengths[2] > 0.01 * steps
    for name, drawn in texts.items():
        assert len(drawn) == NUM_SAMPLES
        count = chi_square_of_each if INTERPRETED else chi_square
        chance = count(drawn, expected[name])
        print(f"{name}: p = {chance:.3g}")
        assert chance > 0.001, name


@pytest.mark.v1_only(reason="a row takes milliseconds there")
def test_distribution_with_trees_of_all_sizes(engine_of, expected):
    """Prompts are read beside trees, and more or fewer nodes are drafted from step to step."""
    schedule = [(1, 20, 8), (21, 30, 3), (31, 45, 1), (46, 60, 8), (61, 512, 3)]
    llm = engine_of("plain", 2, schedule, max_num_seqs=120, max_num_batched_tokens=301)
    texts, watch = draw(llm)
    assert {1, 3, 8} <= set(watch.num_nodes)
    assert watch.met("chunk", "tree") and watch.met("cut")
    assert watch.lengths[1] and watch.lengths[2]
    for name, drawn in texts.items():
        chance = chi_square(drawn, expected[name])
        print(f"{name}: p = {chance:.3g}")
        assert chance > 0.001, name


@pytest.mark.v1_only(reason="tests/unit_triton draws often enough to find them")
@pytest.mark.parametrize("rule", ["no residual", "nothing taken out", "another temperature"])
def test_broken_rules_are_found(rule, engine_of, expected, monkeypatch):
    if rule == "no residual":
        monkeypatch.setattr(sampled_drafts, "_residual", lambda p, q: p)
    elif rule == "nothing taken out":
        monkeypatch.setattr(sampled_drafts, "_without", lambda q, taken: q)
    else:
        right = sampled_drafts.try_children

        def flatter(target, draft, *others):
            probs = draft.probs.sqrt()
            draft = DraftProbs(probs / probs.sum(dim=1, keepdim=True), draft.token_ids)
            return right(target, draft, *others)

        for module in (draft_sampler, draft_rules):
            monkeypatch.setattr(module, "try_children", flatter)
    texts, _ = draw(engine_of("plain", 2), 2500)
    chances = {name: chi_square(drawn, expected[name]) for name, drawn in texts.items()}
    print(chances)
    assert chances["temperature 0.5"] < 1e-6


@pytest.mark.v1_only(reason="the drafter is the same there")
@pytest.mark.parametrize("kind", ["plain", "sequential"])
def test_drafts_are_drawn_from_what_the_heads_say(kind, engine_of, small_model, lively_heads):
    """The distribution at every row, against the module that training uses, path by path."""
    drafter = runner_of(engine_of(kind, 2)).drafter
    trained = TrainableHeads.from_weights(
        load_heads(lively_heads[kind]), TargetMatrices.read(str(small_model))
    )
    ids = torch.arange(SMALL_VOCAB) if trained.token_map is None else trained.token_map
    states, roots = torch.randn(3, HIDDEN), torch.tensor([5, 11, 7])
    temperatures = torch.tensor([0.5, 1.0, 1.5])
    sampling = DraftSampling(temperatures, torch.tensor([99] * 3), torch.ones(3))

    def noise(depth, shape):
        return exponential(shape, {}, states.device)

    for num_nodes in (1, 3, 8):
        drafted, draft = drafter.propose_drawn(states, roots, num_nodes, sampling, noise)
        paths = [(), *drafter.tree.prefix(num_nodes).paths]
        for request in range(3):
            token_of = dict(zip(paths[1:], drafted[request].tolist(), strict=True))
            for row, path in enumerate(paths):
                siblings = [token_of[own] for own in paths[1:] if own[:-1] == path]
                if not siblings:
                    continue
                assert len(set(siblings)) == len(siblings)
                behind = [int(roots[request])]
                behind += [token_of[path[: depth + 1]] for depth in range(len(path))]
                padded = torch.tensor([(behind + [0] * 4)[:4]])
                with torch.no_grad():
                    logits = trained.logits(states[request : request + 1], padded)[len(path)][0]
                wanted = torch.zeros(SMALL_VOCAB)
                wanted[ids] = (logits / temperatures[request]).softmax(dim=-1)
                probs, token_ids = draft.probs[request, row], draft.token_ids[request, row]
                found = torch.zeros(SMALL_VOCAB).index_add(0, token_ids, probs)
                assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.v1_only(reason="the drafter is the same there")
def test_the_first_ranks_noise_counts(engine_of, monkeypatch):
    """Ranks that draw different numbers read the same drafts."""
    drafter = runner_of(engine_of("sequential", 2)).drafter
    states, roots = torch.randn(3, HIDDEN), torch.tensor([5, 11, 7])
    sampling = DraftSampling(torch.ones(3), torch.tensor([99] * 3), torch.ones(3))

    def draft():
        return drafter.propose_drawn(
            states, roots, 8, sampling, lambda depth, shape: exponential(shape, {}, states.device)
        )[0]

    class Group:
        """A rank that is not the first."""

        def broadcast(self, tensor, src):
            assert src == 0
            generator = torch.Generator().manual_seed(tensor.numel())
            return torch.empty_like(tensor).exponential_(generator=generator)

    assert not torch.equal(draft(), draft())
    monkeypatch.setattr("vllm_medusa.drafter.get_tp_group", Group)
    assert torch.equal(draft(), draft())


# -- other requests beside them --------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(models, heads, module_engine):
    """Without trees, and with drafts that are drawn."""
    return plain_and_medusa(models, heads, module_engine, **DRAWN)


def test_what_is_certain_stays(engines):
    expected, outputs, watch = generate_certain(*engines)
    assert not differences(expected, outputs)
    assert set(watch.lengths) == set(range(max(map(len, SMALL_BUSHY)) + 1))


def test_requests_with_a_grammar_keep_fixed_drafts(engines):
    """A grammar leaves drafts out because of their tokens; with fixed drafts a seed's text is that
    without speculation. Others, whose drafts are drawn, stand beside them."""
    plain, drawing = engines
    prompts = make_prompts(fewer(16), VOCAB, seed=33)
    each = [
        {
            "structured_outputs": StructuredOutputsParams(regex="[0-9]{3,12}(abc|xyz)+"),
            "ignore_eos": False,
            "seed": number,
        }
        if number % 2
        else {"temperature": 1.3}
        for number in range(len(prompts))
    ]
    params = {"temperature": 0.8, "max_tokens": fewer(60)}
    expected = tokens(generate(plain, prompts, each, **params))
    known = continuations(prompts, expected)
    with watching() as watch, oracle_drafts(Oracle(known, VOCAB)):
        outputs = tokens(generate(drawing, prompts, each, **params))
    assert outputs[1::2] == expected[1::2]
    assert len(watch.lengths) > 3


def test_seeds_give_the_same_again(engine_of):
    llm = engine_of("sequential", 2)
    each = [{"seed": number, "temperature": 1.0} for number in range(12)]
    first = tokens(generate(llm, [PROMPT] * 12, each, max_tokens=20))
    torch.rand(1)
    assert tokens(generate(llm, [PROMPT] * 12, each, max_tokens=20)) == first
    assert len(set(map(tuple, first))) > 6


@pytest.mark.v1_only(reason="there each request has a place of its own, which is used again")
def test_finished_requests_are_forgotten(engine_of):
    llm = engine_of("plain", 2)
    for _ in range(3):
        generate(llm, [PROMPT] * 4, temperature=1.0, max_tokens=10)
    assert len(runner_of(llm).drawn_from) <= 4
