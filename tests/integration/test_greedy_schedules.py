"""Greedy output stays that of vLLM without speculation, whatever the scheduler does with the
trees."""

from collections import Counter

import pytest
import torch

from tests.integration.generation import (
    SMALL_BUSHY,
    TREES,
    bank_of,
    continuations,
    endings,
    fewer,
    generate,
    make_prompts,
    medusa,
    some,
    step_through,
    tokens,
)
from tests.integration.oracle import Oracle, oracle_drafts
from tests.integration.tiny import VOCAB
from tests.integration.watch import watching
from vllm_medusa.attention.backends import CPUSlotMover
from vllm_medusa.bank import TreeBank
from vllm_medusa.support import TESTED_ARCHITECTURES
from vllm_medusa.tree import MAX_NODES, TokenTree

DEPTH = max(map(len, SMALL_BUSHY))
LENGTH = fewer(60)


@pytest.fixture(scope="module")
def prompts():
    return make_prompts(16, VOCAB, longest=200, seed=1)


@pytest.fixture(scope="module")
def tree_engine(models, heads, module_engine):
    """An engine with the small bushy tree."""

    def start(kind="llama", *, tree=SMALL_BUSHY, schedule=None, model=None, **options):
        spec = medusa(heads(max(map(len, tree))), tree)
        if schedule is not None:
            spec["speculative_config"]["num_speculative_tokens_per_batch_size"] = schedule
        return module_engine(model or models(kind), **spec, **options)

    return start


def guided(llm, prompts, expected, each=None, **params):
    """Generate with the oracle's drafts; returns the outputs and what the scheduler did."""
    with watching() as watch, oracle_drafts(Oracle(continuations(prompts, expected), VOCAB)):
        outputs = generate(llm, prompts, each, **params)
    # Drafts were right: paths of every length were accepted.
    assert len(watch.lengths) > 2
    return outputs, watch


# -- what is read in a step ------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "block_size"), some([(49, 128), (60, 32)]))
def test_chunked_prefill(budget, block_size, tree_engine, models, reference):
    # Long and short prompts by turns: the short ones grow trees while the long ones are still read.
    long = make_prompts(6, VOCAB, prefix=150, longest=50, seed=1)
    short = make_prompts(6, VOCAB, longest=20, seed=2)
    prompts = [prompt for pair in zip(long, short, strict=True) for prompt in pair]
    expected = tokens(reference(models(), prompts, max_tokens=LENGTH))
    llm = tree_engine(
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=16,
        max_num_seqs=8,
        block_size=block_size,
    )
    outputs, watch = guided(llm, prompts, expected, max_tokens=LENGTH)
    assert tokens(outputs) == expected
    # Pieces of prompts were read beside trees, trees cut by the budget, and plain decodes.
    assert watch.met("chunk", "tree", "cut")
    assert watch.met("chunk", "tree", "decode")
    assert len(watch.num_nodes) >= fewer(3, 2)
    assert set(watch.lengths) == set(range(DEPTH + 1))


def test_tree_larger_than_the_budget(tree_engine, models, reference, prompts):
    prompts = prompts[:6]
    expected = tokens(reference(models(), prompts, max_tokens=LENGTH))
    llm = tree_engine(tree=TREES["bushy63"], max_num_batched_tokens=40, max_num_seqs=8)
    outputs, watch = guided(llm, prompts, expected, max_tokens=LENGTH)
    assert tokens(outputs) == expected
    assert watch.num_nodes and max(watch.num_nodes) < 63


@pytest.mark.parametrize("block_size", some([64, 32]))
def test_prefix_cache(block_size, tree_engine, models, reference):
    shared = make_prompts(10, VOCAB, prefix=150, longest=40, seed=2)
    llm = tree_engine(enable_prefix_caching=True, block_size=block_size)
    expected = tokens(reference(models(), shared, max_tokens=LENGTH))
    for repetition in range(2):
        outputs, _ = guided(llm, shared, expected, max_tokens=LENGTH)
        assert tokens(outputs) == expected
        if repetition:
            assert min(output.num_cached_tokens for output in outputs) >= 128

    # A conversation goes on: the new prompt's hit ends among tokens that were accepted nodes.
    longer = [prompt + text for prompt, text in zip(shared, expected, strict=True)]
    expected = tokens(reference(models(), longer, max_tokens=LENGTH))
    outputs, _ = guided(llm, longer, expected, max_tokens=LENGTH)
    assert tokens(outputs) == expected
    hits = [
        output.num_cached_tokens > len(prompt)
        for output, prompt in zip(outputs, shared, strict=True)
    ]
    assert sum(hits) >= 2


def test_all_but_one_token_cached(tree_engine, models, reference):
    """Such a request reads one token; vLLM would pad it with drafts of -1: that is off."""
    block_size = 32
    cached = [prompt[: 2 * block_size + 1] for prompt in make_prompts(4, VOCAB, prefix=80, seed=3)]
    for number, prompt in enumerate(cached):
        prompt[0] = number + 3
    others = make_prompts(4, VOCAB, seed=4)
    prompts = cached + others
    expected = tokens(reference(models(), prompts, max_tokens=LENGTH))
    llm = tree_engine(enable_prefix_caching=True, block_size=block_size)
    generate(llm, cached, max_tokens=1)
    arrivals = {0: dict(zip("abcd", others, strict=True)), 5: {"e": cached[0]}}
    arrivals |= {7: {"f": cached[1], "g": cached[2]}, 8: {"h": cached[3]}}
    with watching() as watch, oracle_drafts(Oracle(continuations(prompts, expected), VOCAB)):
        said = step_through(llm, arrivals, {}, max_tokens=LENGTH)
    assert tokens(said[name] for name in "efghabcd") == expected
    assert not any(step["padded"] for step in watch.steps)


def test_a_tree_larger_than_the_token_budget(tree_engine, models, reference):
    """With padding, a request that has one token to read would wait for ever."""
    prompt = make_prompts(1, VOCAB, prefix=33, seed=5)[0][:33]
    expected = tokens(reference(models(), [prompt], max_tokens=LENGTH))
    llm = tree_engine(
        tree=TREES["bushy63"],
        enable_prefix_caching=True,
        block_size=32,
        max_num_batched_tokens=32,
        max_num_seqs=4,
    )
    generate(llm, [prompt], max_tokens=1)
    with oracle_drafts(Oracle(continuations([prompt], expected), VOCAB)):
        outputs = generate(llm, [prompt], max_tokens=LENGTH)
    assert outputs[0].num_cached_tokens == 32
    assert tokens(outputs) == expected


# -- requests that come, go and wait ---------------------------------------------------------------


@pytest.mark.parametrize("caching", some([False, True]))
def test_preemption(caching, tree_engine, models, reference, prompts):
    short = [prompt[:60] for prompt in prompts]
    expected = tokens(reference(models(), short, max_tokens=LENGTH))
    llm = tree_engine(
        block_size=32,
        num_gpu_blocks_override=15,
        max_model_len=160,
        enable_prefix_caching=caching,
        max_num_batched_tokens=200,
    )
    outputs, watch = guided(llm, short, expected, max_tokens=LENGTH)
    assert tokens(outputs) == expected
    assert watch.preemptions > 3


def test_staggered_arrivals_and_aborts(tree_engine, models, reference, prompts):
    expected = tokens(reference(models(), prompts, max_tokens=LENGTH))
    names = [f"request {number}" for number in range(len(prompts))]
    arrivals: dict[int, dict[str, list[int]]] = {}
    for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
        arrivals.setdefault(number * 2 // 3, {})[name] = prompt
    aborted = {4: names[:2], 7: [names[3]], 9: [names[12], names[7]]}
    llm = tree_engine()
    with watching() as watch, oracle_drafts(Oracle(continuations(prompts, expected), VOCAB)):
        said = step_through(llm, arrivals, aborted, max_tokens=LENGTH)
    gone = {name for step in aborted.values() for name in step}
    for name, text in zip(names, expected, strict=True):
        # Or aborted before it said anything.
        found = tokens([said[name]])[0] if name in said else []
        assert found == text[: len(found)]
        assert (len(found) < LENGTH) == (name in gone)
    assert watch.met("chunk", "tree")
    assert set(watch.lengths) == set(range(DEPTH + 1))


def test_batch_size_schedule(tree_engine, models, reference, prompts):
    """vLLM's own schedule cuts the tree to prefixes by batch size, down to no tree at all."""
    each = [{"max_tokens": 10 + 4 * number} for number in range(len(prompts))]
    whole = tokens(reference(models(), prompts, max_tokens=100))
    llm = tree_engine(schedule=[(1, 2, 15), (3, 5, 6), (6, 9, 1), (10, 64, 0)])
    outputs, watch = guided(llm, prompts, whole, each)
    assert tokens(outputs) == [
        text[: own["max_tokens"]] for text, own in zip(whole, each, strict=True)
    ]
    assert set(watch.num_nodes) == {15, 6, 1}
    assert Counter(decode=len(prompts)) in watch.steps


# -- ends inside an accepted path ------------------------------------------------------------------


def test_max_tokens(tree_engine, models, reference, prompts):
    whole = tokens(reference(models(), prompts, max_tokens=LENGTH))
    each = [{"max_tokens": number % 12 + 1} for number in range(len(prompts))]
    outputs, watch = guided(tree_engine(), prompts, whole, each)
    assert tokens(outputs) == [
        text[: own["max_tokens"]] for text, own in zip(whole, each, strict=True)
    ]
    assert_cut_inside_a_path(outputs, watch, reasons={"length"})


def test_max_model_len(tree_engine, models, reference):
    room = 96
    prompts = [
        prompt[:length]
        for prompt, length in zip(
            make_prompts(16, VOCAB, prefix=room, seed=5), range(room - 16, room), strict=True
        )
    ]
    whole = tokens(reference(models(), prompts, max_tokens=LENGTH))
    llm = tree_engine(max_model_len=room)
    outputs, watch = guided(llm, prompts, whole, max_tokens=LENGTH)
    assert tokens(outputs) == [
        text[: room - len(prompt)] for text, prompt in zip(whole, prompts, strict=True)
    ]
    assert {reason for reason, _ in endings(outputs)} == {"length"}
    assert len(watch.num_nodes) > 5  # trees were cut as the end came near


def test_stop_token(tree_engine, models, reference, prompts):
    whole = tokens(reference(models(), prompts, max_tokens=LENGTH))
    each = [
        {"stop_token_ids": [text[number + 2], text[(number + 20) % LENGTH]]}
        for number, text in enumerate(whole)
    ]
    expected = reference(models(), prompts, each, max_tokens=LENGTH)
    outputs, watch = guided(tree_engine(), prompts, whole, each, max_tokens=LENGTH)
    assert tokens(outputs) == tokens(expected)
    assert endings(outputs) == endings(expected)
    assert_cut_inside_a_path(outputs, watch, reasons={"stop"})


def test_end_of_sequence(tree_engine, models, reference, prompts):
    whole = tokens(reference(models(), prompts, max_tokens=LENGTH))
    common = Counter(token for text in whole for token in set(text[3:])).most_common(2)
    model = models(eos_token_id=[token for token, _ in common])
    expected = reference(model, prompts, max_tokens=LENGTH, ignore_eos=False)
    assert tokens(expected) != whole
    outputs, watch = guided(
        tree_engine(model=model), prompts, whole, max_tokens=LENGTH, ignore_eos=False
    )
    assert tokens(outputs) == tokens(expected)
    assert endings(outputs) == endings(expected)
    assert_cut_inside_a_path(outputs, watch, reasons={"stop", "length"})


def assert_cut_inside_a_path(outputs, watch, reasons):
    """More tokens were accepted than came out: some end lay inside a path."""
    assert {reason for reason, _ in endings(outputs)} == reasons
    accepted = sum((length + 1) * count for length, count in watch.lengths.items())
    assert accepted + len(outputs) > sum(map(len, tokens(outputs)))


# -- models and number formats ---------------------------------------------------------------------


KINDS = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.v1_only(reason="a target's architecture is vLLM's affair there as here")
@pytest.mark.parametrize("kind", KINDS)
def test_architectures(kind, tree_engine, models, reference, prompts):
    expected = tokens(reference(models(kind), prompts, max_tokens=LENGTH))
    llm = tree_engine(kind)
    outputs, watch = guided(llm, prompts, expected, max_tokens=LENGTH)
    assert tokens(outputs) == expected
    assert set(watch.lengths) == set(range(DEPTH + 1))
    assert llm.model_config.architecture == TESTED_ARCHITECTURES[KINDS.index(kind)]
    assert len(KINDS) == len(TESTED_ARCHITECTURES)


@pytest.mark.v1_only(reason="attention in bfloat16 is compared in tests/unit_triton")
def test_bfloat16(tree_engine, models, plain_engine, prompts):
    """In bfloat16 the best logits are often closer than its rounding, and texts part there.

    So texts are not compared, but every token with what float32 makes of the same weights and the
    same text: it is the best there, or short of it by little more than without trees.
    """
    import transformers

    plain = tokens(generate(plain_engine(models(), dtype="bfloat16"), prompts, max_tokens=LENGTH))
    llm = tree_engine(dtype="bfloat16")
    outputs, watch = guided(llm, prompts, plain, max_tokens=LENGTH)
    assert max(watch.lengths) == DEPTH
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models(), dtype=torch.bfloat16
    ).float()

    def shortfalls(texts):
        short = []
        for prompt, text in zip(prompts, texts, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt + text[:-1]])).logits[0, len(prompt) - 1 :]
            short.append(logits.amax(dim=1) - logits[range(len(text)), text])
        return torch.cat(short)

    without, with_trees = shortfalls(plain), shortfalls(tokens(outputs))
    assert with_trees.max() < 2 * without.max()
    assert with_trees.mean() < 2 * without.mean()


# -- these tests have teeth ------------------------------------------------------------------------


def break_compaction(llm, patch):
    patch.setattr(CPUSlotMover, "move", lambda *args: None)


def break_positions(llm, patch):
    bank = bank_of(llm)
    patch.setattr(bank, "depth_offset", torch.zeros_like(bank.depth_offset))


def break_mask(llm, patch):
    # A chain's mask is the causal one: every row sees all rows before it.
    chain = TreeBank([TokenTree.chain(MAX_NODES)])
    patch.setattr(bank_of(llm), "ancestors", chain.ancestors)


@pytest.mark.parametrize("fault", [break_compaction, break_positions, break_mask])
def test_teeth(fault, tree_engine, models, reference, prompts, monkeypatch):
    expected = tokens(reference(models(), prompts, max_tokens=LENGTH))
    llm = tree_engine()
    fault(llm, monkeypatch)
    outputs, _ = guided(llm, prompts, expected, max_tokens=LENGTH)
    identical = sum(map(list.__eq__, tokens(outputs), expected))
    print(f"{fault.__name__}: {identical} of {len(prompts)} texts identical")
    assert identical <= len(prompts) // 4
