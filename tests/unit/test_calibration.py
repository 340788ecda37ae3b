"""Choosing a tree: from rank paths and costs to nodes by batch size. No engine is started."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_medusa.calibration.cost import BatchCost, CostOptions, StepCost
from vllm_medusa.calibration.cost_file import COSTS_FILE, read_costs, save_costs
from vllm_medusa.calibration.errors import CalibrationError
from vllm_medusa.calibration.growth import accuracies, grow_tree, head_counts, rank_counts
from vllm_medusa.calibration.live import set_tree_size
from vllm_medusa.calibration.ranks_file import (
    MISS,
    RANKS_FILE,
    check_ranks,
    read_ranks,
    save_ranks,
)
from vllm_medusa.calibration.record import Calibration, to_json, to_table
from vllm_medusa.calibration.replay import tokens_per_step
from vllm_medusa.calibration.schedule import choose_sizes, gains, to_schedule
from vllm_medusa.machine import differences, these_versions, this_machine
from vllm_medusa.stored_tree import read_stored_tree
from vllm_medusa.tree import TokenTree, TreeError

X = MISS


def ranks(*rows):
    return np.array(rows, dtype=np.uint8)


@st.composite
def rank_paths(draw, num_heads=3):
    """Rank paths of a few answers, with nothing behind their ends."""
    entry = st.sampled_from([0, 0, 0, 1, 1, 2, 9, X])
    answers = []
    for length in draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)):
        path = np.array(
            [[draw(entry) for _ in range(num_heads)] for _ in range(length)], dtype=np.uint8
        )
        for depth in range(num_heads):
            path[max(length - depth, 0) :, depth] = X
        answers.append(path)
    return answers


# -- the file of rank paths ------------------------------------------------------------------------


def test_rank_paths_come_back_as_they_were_stored(tmp_path):
    paths = [ranks([0, 3], [9, X]), ranks([X, X]), ranks([1, 2], [0, 0], [0, X])]
    save_ranks(tmp_path, paths)
    assert [path.name for path in tmp_path.iterdir()] == [RANKS_FILE]
    found = read_ranks(tmp_path)
    assert [path.tolist() for path in found] == [path.tolist() for path in paths]
    assert {path.dtype for path in found} == {np.dtype(np.uint8)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"ranks": ranks([0, 0])}, "lacks the tensors"),
        ({"ranks": np.zeros((2, 2)), "lengths": np.array([2])}, "float64"),
        ({"ranks": ranks([0, 0]), "lengths": np.array([2])}, "does not add up to the 1 positions"),
        ({"ranks": ranks([0, 0]), "lengths": np.array([2, -1])}, "does not add up"),
    ],
)
def test_a_bad_file_of_rank_paths_is_named(tmp_path, tensors, words):
    save_file(tensors, tmp_path / RANKS_FILE)
    with pytest.raises(CalibrationError, match=words) as error:
        read_ranks(tmp_path)
    assert str(tmp_path / RANKS_FILE) in str(error.value)


def test_no_rank_paths(tmp_path):
    with pytest.raises(CalibrationError, match=r"--data prompts\.jsonl"):
        read_ranks(tmp_path)
    (tmp_path / RANKS_FILE).write_text("nonsense")
    with pytest.raises(CalibrationError, match="cannot be read"):
        read_ranks(tmp_path)


def test_rank_paths_of_other_heads():
    check_ranks([ranks([0, 0])], 2, "F")
    with pytest.raises(CalibrationError, match=r"F is for \[2\] heads, the checkpoint holds 3"):
        check_ranks([ranks([0, 0])], 3, "F")
    with pytest.raises(CalibrationError, match="F holds no positions"):
        check_ranks([], 3, "F")


# -- accuracies and growth -------------------------------------------------------------------------


def test_accuracies_are_given_that_the_path_is_right():
    # Head 2 after a miss of head 1 does not count, nor does what lies behind the answer's end.
    path = ranks([0, 1], [0, 0], [1, 1], [X, 0], [0, X])
    table = accuracies(head_counts(rank_counts([path]), 2))
    assert table[0][:3] == pytest.approx([3 / 5, 1 / 5, 0])
    assert table[1][:3] == pytest.approx([1 / 3, 2 / 3, 0])


def test_growth_sees_what_a_product_of_accuracies_cannot():
    # Head 2 is right exactly where head 1 says rank 1; the product would put [0, 0] first.
    rows = [[0, X]] * 600 + [[1, 0]] * 300 + [[X, X]] * 100
    # One answer per row, followed by a last position that is nothing.
    paths = [ranks(row, [X, X]) for row in rows]
    tree = grow_tree(rank_counts(paths), 2, 20, 10)
    assert tree.paths[:3] == ((0,), (1,), (1, 0))
    assert tree.paths.index((1, 0)) < tree.paths.index((0, 0))


@given(rank_paths(), st.integers(1, 127), st.integers(2, 10))
def test_growth_fills_any_size(paths, size, num_ranks):
    counts = rank_counts(paths)
    tree = grow_tree(counts, 3, size, num_ranks)
    assert len(tree) == min(size, num_ranks + num_ranks**2 + num_ranks**3)
    assert max(tree.num_ranks) <= num_ranks and tree.depth <= 3
    assert grow_tree(counts, 3, size, num_ranks) == tree
    assert grow_tree(counts, 3, max(size // 2, 1), num_ranks).paths == tree.paths[: size // 2 or 1]


def test_thin_counts_are_filled_in():
    # A single position was seen at [9]; 63 nodes must not follow where it went.
    paths = [ranks([0, 0, 0], [0, 0, 0], [0, 0, X], [0, X, X])] * 200
    paths.append(ranks([9, 9, 9], [X, X, X], [X, X, X]))
    tree = grow_tree(rank_counts(paths), 3, 5, 10)
    assert tree.paths[:3] == ((0,), (0, 0), (0, 0, 0))
    assert (9, 9, 9) not in tree.paths


# -- replay ----------------------------------------------------------------------------------------


def walk(paths, tree):
    """Tokens per step, one step after the other, in the plainest way."""
    steps = tokens = 0
    for path in paths:
        position = 0
        while position < len(path):
            accepted = 0
            while accepted < path.shape[1]:
                if tuple(path[position, : accepted + 1].tolist()) not in tree.paths:
                    break
                accepted += 1
            got = min(accepted + 1, len(path) - position)
            tokens, steps, position = tokens + got, steps + 1, position + got
    return tokens / steps


@given(rank_paths(), st.integers(1, 40))
def test_replay_is_the_walk(paths, size):
    tree = grow_tree(rank_counts(paths), 3, size, 10)
    rates = tokens_per_step(paths, tree)
    assert rates[0] == 1
    assert len(rates) == size + 1
    for nodes in range(1, size + 1):
        assert rates[nodes] == pytest.approx(walk(paths, tree.prefix(nodes)))


def test_replay_resumes_behind_what_was_accepted():
    path = ranks([0, 0], [1, 1], [0, 0], [0, X])
    tree = TokenTree.from_paths([[0], [0, 0]])
    # All right from position 0: three tokens; then position 3: its one token. [1, 1] is skipped.
    assert tokens_per_step([path], tree)[2] == 2
    # With one node: 0 -> 2 -> 4.
    assert tokens_per_step([path], tree)[1] == 2


# -- the choice ------------------------------------------------------------------------------------


TOKENS = [1.0, 1.4, 1.6, 1.75]


def test_gain_between_measured_sizes():
    assert gains(TOKENS, {0: 2.0, 1: 2.0, 3: 4.0}) == pytest.approx(
        [1.0, 1.4, 1.6 * 2 / 3, 1.75 / 2]
    )
    # Nothing is said about sizes beyond the largest measured one, nor beyond the tree.
    assert len(gains(TOKENS, {0: 1.0, 1: 1.1})) == 2
    assert len(gains(TOKENS, {0: 1.0, 63: 9.0})) == 4


def test_a_slow_moment_without_speculation_does_not_make_trees_look_good():
    assert gains(TOKENS, {0: 3.0, 1: 1.0, 3: 2.0}) == pytest.approx([1, 1.4, 1.6 / 1.5, 1.75 / 2])
    disturbed = {0: 3.0, 1: 1.36, 3: 2.0}
    assert choose_sizes([1.0, 1.02, 1.02, 1.02], {1: disturbed}) == {1: 0}


def test_the_size_that_promises_most():
    cheap, dear = {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, {0: 1.0, 1: 1.2, 2: 2.0, 3: 3.0}
    hopeless = {0: 1.0, 1: 1.5}
    assert choose_sizes(TOKENS, {1: cheap, 2: dear, 4: hopeless}) == {1: 3, 2: 1, 4: 0}
    # Never more again at a larger batch.
    assert choose_sizes(TOKENS, {1: dear, 2: cheap}) == {1: 1, 2: 1}
    assert choose_sizes(TOKENS, {1: hopeless, 2: cheap}) == {1: 0, 2: 0}


def test_a_gain_within_the_noise_is_none():
    barely = {0: 1.0, 1: 1.4 / 1.02}
    assert choose_sizes(TOKENS, {1: barely}) == {1: 0}
    assert choose_sizes(TOKENS, {1: barely}, min_gain=1.01) == {1: 1}


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ({1: 3, 2: 3, 4: 1, 8: 0, 16: 0}, [[1, 2, 3], [3, 4, 1], [5, 16, 0]]),
        ({1: 3, 2: 3}, [[1, 2, 3], [3, 3, 0]]),
        ({1: 0, 2: 0, 4: 0}, [[1, 4, 0]]),
    ],
)
def test_schedule(sizes, schedule):
    assert to_schedule(sizes) == schedule
    # As vLLM's scheduler reads it, up to batch sizes that were not measured.
    table = build_dynamic_sd_schedule_lookup(schedule, 32, 3)
    for batch_size in range(1, 33):
        larger = [size for size in sizes if size >= batch_size]
        assert table[batch_size] == (sizes[min(larger)] if larger else 0)


def test_batch_sizes():
    assert CostOptions(max_num_seqs=1).batch_sizes() == [1]
    assert CostOptions(max_num_seqs=8).batch_sizes() == [1, 2, 4, 8]
    assert CostOptions(max_num_seqs=12).batch_sizes() == [1, 2, 4, 8, 12]


def test_set_tree_size():
    table = [0, 5, 5, 0]
    scheduler = SimpleNamespace(num_spec_tokens=5, dynamic_sd_lookup=table)
    set_tree_size(scheduler, 2)
    assert table == [2, 2, 2, 2] and scheduler.num_spec_tokens == 5
    with pytest.raises(ValueError, match="6 nodes"):
        set_tree_size(scheduler, 6)


# -- files -----------------------------------------------------------------------------------------


def batch_cost(batch_size, seconds, others=0.0):
    sizes = [StepCost(nodes, step, step / 2, 0.001, 10) for nodes, step in seconds.items()]
    return BatchCost(batch_size, sizes, others)


RESULT = Calibration(
    tree=TokenTree.from_paths([[0], [0, 0], [1]]),
    accuracies=[[0.5, 0.25], [0.125, 0.0]],
    tokens=TOKENS,
    num_answers=2,
    num_positions=40,
    costs=[batch_cost(1, {0: 0.05, 1: 0.05, 3: 0.06}), batch_cost(2, {0: 0.05, 1: 0.09}, 0.4)],
    about={"machine": this_machine(), "versions": these_versions(), "dtype": "float32"},
    min_gain=1.03,
)


def test_what_is_written_is_what_serving_reads(tmp_path):
    file = tmp_path / "medusa_tree.json"
    file.write_text(to_json(RESULT))
    stored = read_stored_tree(file, 2)
    assert stored.tree == RESULT.tree
    assert stored.num_nodes == 3 and stored.most_nodes == 3
    assert stored.schedule == [[1, 1, 3], [2, 2, 0]]
    assert differences(stored.machine, stored.versions) == []
    content = json.loads(file.read_text())
    assert content["costs"] == {
        "1": {"0": 0.05, "1": 0.05, "3": 0.06},
        "2": {"0": 0.05, "1": 0.09},
    }
    assert content["tokens_per_step"] == TOKENS
    assert content["cores_kept_busy_by_others"] == {"1": 0.0, "2": 0.4}
    assert max(map(len, file.read_text().splitlines())) < 400  # one entry a line


def test_the_table_shows_the_choice_even_between_measured_sizes():
    # 2 nodes were not measured, but promise most: cost 0.055 on the line between.
    result = replace(RESULT, tokens=[1.0, 1.2, 1.6, 1.65])
    table = to_table(result)
    rows = list(zip(*(column._cells for column in table.columns), strict=True))
    assert [row[:2] for row in rows if row[-1] == "chosen"] == [("1", "2"), ("2", "0")]
    assert ("1", "2", "1.600", "", "1.100", "1.455", "chosen") in rows
    assert result.disturbed() == [2]


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from vllm_medusa.calibration.picture import draw

    draw(RESULT, tmp_path / "medusa_tree.png")
    assert (tmp_path / "medusa_tree.png").read_bytes().startswith(b"\x89PNG")


def test_costs_are_taken_again_only_with_the_same_settings(tmp_path):
    settings = {"cost": {"rounds": 3}, "tokens": [1.0, 1.4], "paths": [[0]]}
    assert read_costs(tmp_path, settings) == ({}, [])
    save_costs(tmp_path, settings, {"dtype": "float32"}, RESULT.costs)
    assert read_costs(tmp_path, settings) == ({"dtype": "float32"}, RESULT.costs)
    assert read_costs(tmp_path, settings | {"tokens": [1.0, 1.5]}) == ({}, [])
    (tmp_path / COSTS_FILE).write_text('{"settings": ')
    assert read_costs(tmp_path, settings) == ({}, [])


@pytest.mark.parametrize(
    ("content", "num_nodes", "schedule", "most"),
    [
        ([[0], [1]], None, None, 2),
        ({"paths": [[0], [1]]}, None, None, 2),
        ({"paths": [[0], [1]], "num_speculative_tokens": 1}, 1, None, 1),
        ({"paths": [[0], [1]], "num_speculative_tokens": 0}, 0, [[1, 1, 0]], 0),
        (
            {"paths": [[0]], "num_speculative_tokens_per_batch_size": [[1, 2, 9], [3, 4, 0]]},
            None,
            [[1, 2, 1], [3, 4, 0]],
            1,
        ),
    ],
)
def test_every_shape_of_the_tree_file(tmp_path, content, num_nodes, schedule, most):
    file = tmp_path / "medusa_tree.json"
    file.write_text(json.dumps(content))
    stored = read_stored_tree(file, 2)
    assert (stored.num_nodes, stored.schedule, stored.most_nodes) == (num_nodes, schedule, most)
    assert differences(stored.machine, stored.versions) == []


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"num_speculative_tokens": "2"}, "num_speculative_tokens is '2'"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens is 3, but paths holds 1"),
        ({"num_speculative_tokens_per_batch_size": [[2, 4, 1]]}, "per_batch_size is .* start at 1"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4]]}, "per_batch_size is .* 3-item"),
        ({"num_speculative_tokens_per_batch_size": 7}, "per_batch_size is 7"),
        ({"machine": "a fast one"}, "machine is 'a fast one', expected an object"),
        ({"versions": []}, r"versions is \[\], expected an object"),
    ],
)
def test_a_bad_key_of_the_tree_file_is_named(tmp_path, entries, words):
    file = tmp_path / "medusa_tree.json"
    file.write_text(json.dumps({"paths": [[0]], **entries}))
    with pytest.raises(TreeError, match=words) as error:
        read_stored_tree(file, 2)
    assert str(file) in str(error.value)


def test_another_machine_is_told():
    machine, versions = this_machine(), these_versions()
    assert differences(machine | {"cores": 999}, versions)[0].startswith("cores 999, here ")
    assert differences(machine, versions | {"vllm": "0.1"})[0].startswith("vLLM 0.1, here ")
    assert differences(machine | {"gpu": "H"}, versions) == ["gpu H, here none"]
    assert differences(machine, versions | {"torch": "0.1"}) == []
