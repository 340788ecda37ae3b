"""The walk of a grammar over a tree, against every path followed by itself."""

import random
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.structured_output import ConstraintBounds

from vllm_medusa.drafts import TreeDraftTokenIds
from vllm_medusa.grammar import bitmask_width, tree_bitmask, valid_drafts
from vllm_medusa.tree import TokenTree

VOCAB = 6
END = 0  # ends the text
BEGIN = 5  # ends the thinking
TREES = 200


class Grammar:
    """Texts of few words; complains about all that vLLM's backends cannot bear."""

    def __init__(self, words):
        self.words = words
        self.text = []

    def allowed(self, text):
        behind = {word[len(text)] for word in self.words if word[: len(text)] == text != word}
        return behind | ({END} if text in self.words else set())

    def validate_tokens(self, tokens):
        assert not self.is_terminated()
        assert all(token >= 0 for token in tokens)
        for length, token in enumerate(tokens):
            if token not in self.allowed(self.text + tokens[:length]):
                return tokens[:length]
        return tokens

    def accept_tokens(self, request_id, tokens):
        assert self.validate_tokens(tokens) == tokens
        self.text += tokens
        return True

    def rollback(self, number):
        assert 0 < number <= len(self.text)
        del self.text[-number:]

    def is_terminated(self):
        return END in self.text

    def fill_bitmask(self, bitmask, row):
        assert not self.is_terminated()
        bitmask[row] = bits(self.allowed(self.text))


def bits(tokens):
    return sum(1 << token for token in tokens)


class Manager:
    """vLLM's manager with a request that thinks first, or does not."""

    def __init__(self, thinks):
        self.thinks = thinks
        self.backend = SimpleNamespace(
            allocate_token_bitmask=lambda rows: torch.zeros(rows, 1, dtype=torch.int32)
        )

    def _get_constraint_bounds(self, request, tokens):
        if not self.thinks:
            return ConstraintBounds(0, 0)
        place = tokens.index(BEGIN) if BEGIN in tokens else len(tokens)
        return ConstraintBounds(place + 1, place + 1)


def request_with(grammar):
    return SimpleNamespace(
        request_id="r",
        structured_output_request=SimpleNamespace(grammar=grammar),
    )


def random_tree(numbers):
    paths = [()]
    for _ in range(numbers.randint(1, 15)):
        parent = numbers.choice(paths)
        rank = sum(path[:-1] == parent for path in paths if path)
        paths.append((*parent, rank))
    return TokenTree.from_paths(paths[1:])


def random_grammar(numbers):
    words = [[numbers.randrange(1, VOCAB) for _ in range(numbers.randint(1, 5))] for _ in range(12)]
    return Grammar(words)


def path_tokens(tree, node, drafts):
    path = tree.paths[node]
    ends = [path[:depth] for depth in range(1, len(path) + 1)]
    return [drafts[tree.paths.index(end)] for end in ends]


def expected_mask(grammar, path, thinks):
    """What may come behind a path, or None where the path cannot be; each path by itself."""
    if thinks:
        if BEGIN not in path:
            return -1
        path = path[path.index(BEGIN) + 1 :]
    if END in path[:-1] or grammar.validate_tokens(path) != path:
        return None
    return -1 if END in path else bits(grammar.allowed(grammar.text + path))


@pytest.mark.parametrize("thinks", [False, True])
def test_masks_and_drafts_are_those_of_every_path(thinks):
    numbers = random.Random(0)
    cut = 0
    for _ in range(TREES):
        tree = random_tree(numbers)
        drafts = [numbers.randrange(VOCAB) for _ in range(numbers.randint(1, len(tree)))]
        grammar = random_grammar(numbers)
        manager, request = Manager(thinks), request_with(grammar)
        masks = [expected_mask(grammar, [], thinks)]
        masks += [
            expected_mask(grammar, path_tokens(tree, node, drafts), thinks)
            for node in range(len(drafts))
        ]
        found = tree_bitmask(manager, {"r": request}, ["r"], {"r": drafts}, tree)
        assert found[:, 0].tolist() == [-1 if mask is None else mask for mask in masks]
        last = max(row for row, mask in enumerate(masks) if mask is not None)
        assert valid_drafts(manager, request, drafts, tree) == drafts[:last]
        assert grammar.text == []
        cut += last < len(drafts)
    assert cut > TREES / 4 or thinks


def test_requests_stand_one_behind_the_other():
    tree = random_tree(random.Random(1))
    grammars = [Grammar([[1, 2]]), Grammar([[3]]), Grammar([[4, 1]])]
    requests = {str(i): request_with(grammar) for i, grammar in enumerate(grammars)}
    assert tree.paths[0] == (0,)
    # The second has no drafts; the third's were not filled by vLLM.
    found = tree_bitmask(Manager(False), requests, ["2", "0", "1"], {"0": [1], "2": [-1, -1]}, tree)
    assert found[:, 0].tolist() == [bits([4]), -1, -1, bits([1]), bits([2]), bits([3])]
    assert tree_bitmask(Manager(False), requests, [], {}, tree) is None


def test_every_request_may_have_the_same_number_of_rows():
    tree = TokenTree.from_paths([[0], [1], [0, 0]])
    requests = {"a": request_with(Grammar([[1, 2]])), "b": request_with(Grammar([[3, 4]]))}
    scheduled = {"a": [1], "b": [3, 5, 4]}
    found = tree_bitmask(Manager(False), requests, ["a", "b"], scheduled, tree, width=4)
    assert found[:4, 0].tolist() == [bits([1]), bits([2]), -1, -1]
    assert found[4:, 0].tolist() == [bits([3]), bits([4]), -1, bits([END])]


def test_tokens_that_would_end_the_thinking_wrongly_are_forbidden():
    """As vLLM 0.33 says: they would be the first of the output, and the grammar refuses them."""
    manager = Manager(thinks=True)
    manager._masked_reasoning_ends = lambda request: (4, 31)
    tree = TokenTree.from_paths([[0], [1], [0, 0]])
    request = request_with(Grammar([[1, 2]]))
    found = tree_bitmask(manager, {"r": request}, ["r"], {"r": [2, BEGIN, BEGIN]}, tree)
    thinking = bits(set(range(32)) - {4, 31})
    assert found[:, 0].tolist() == [thinking, thinking, bits([1]), bits([1])]


@pytest.mark.parametrize(
    ("is_v2", "functions", "width"),
    [(False, [], None), (True, ["_build_grammar_mapping"], None), (True, [], 8)],
    ids=["V1", "0.32", "0.33"],
)
def test_rows_of_a_request_by_runner_and_release(is_v2, functions, width, monkeypatch):
    module = SimpleNamespace(**dict.fromkeys(functions))
    package = SimpleNamespace(structured_outputs=module)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu", package)
    config = SimpleNamespace(
        use_v2_model_runner=is_v2, speculative_config=SimpleNamespace(num_speculative_tokens=7)
    )
    assert bitmask_width(config) == width


def test_drafts_may_be_a_chain():
    tree = TokenTree.from_paths([[0], [1], [2], [3]])
    manager, request = Manager(False), request_with(Grammar([[1, 2, 3]]))
    assert valid_drafts(manager, request, [1, 2, 3, 4], tree) == [1]
    note = TreeDraftTokenIds(["r", "gone"], [[1, 2, 3, 4], []], [True, True])
    note.note({"r": request})
    assert valid_drafts(manager, request, [1, 2, 3, 4], tree) == [1, 2, 3]
    found = tree_bitmask(manager, {"r": request}, ["r"], {"r": [1, 2]}, tree)
    assert found[:, 0].tolist() == [bits([1]), bits([2]), bits([3])]


def test_nothing_is_drafted_behind_the_end():
    tree = random_tree(random.Random(3))
    grammar = Grammar([[1]])
    grammar.text = [1, END]
    manager, request = Manager(False), request_with(grammar)
    assert valid_drafts(manager, request, [1] * len(tree), tree) == []
    assert tree_bitmask(manager, {"r": request}, ["r"], {"r": [1]}, tree).tolist() == [[-1], [-1]]
