"""The benchmark's numbers: pairing, medians, table, page and picture, from made-up answers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_medusa.bench.calibration import Calibration, read_calibration
from vllm_medusa.bench.generation import (
    Generation,
    accepted_per_depth,
    decoding_speed,
    overall_speed,
    tokens_per_step,
)
from vllm_medusa.bench.report import (
    DETAIL_HEADINGS,
    Report,
    details,
    explanation,
    markdown,
    overview,
    save,
    step_split,
)
from vllm_medusa.bench.rounds import Round
from vllm_medusa.bench.summary import ALL, Spread, spread, summarize
from vllm_medusa.bench.variants import (
    PLAIN,
    Variant,
    chain_variant,
    file_variants,
    heads_only,
    is_heads_only,
    tree_variant,
)
from vllm_medusa.calibration.schedule import gains

VARIANTS = [PLAIN, Variant("tree", {"method": "medusa"}, 3)]
CALIBRATION = Calibration(
    nodes=3,
    schedule=[[1, 2, 3], [3, 8, 1], [9, 9, 0]],
    accuracies=[[0.5, 0.1], [0.4, 0.1]],
    tokens=[1.0, 1.5, 1.6, 1.8],
    costs={1: {0: 0.05, 1: 0.06, 3: 0.08}, 4: {0: 0.1, 1: 0.15, 3: 0.3}},
)


def generation(seconds, tokens=9, steps=9, text=7, prefill=1.0):
    """`tokens` tokens in `steps` steps: `prefill` seconds for the first, `seconds` for the rest."""
    counts = [1 + round(step * (tokens - 1) / (steps - 1)) for step in range(steps)]
    times = [prefill + step * seconds / (steps - 1) for step in range(steps)]
    return Generation([text] * tokens, counts, times)


def make_round(number, kind, plain, tree, others=0.0, temperature=0.0, at_once=1):
    text = 7 if number else 8  # the first round's texts differ
    return Round(
        f"task {number}",
        kind,
        temperature,
        [
            [generation(plain) for _ in range(at_once)],
            [generation(tree, steps=5, text=text) for _ in range(at_once)],
        ],
        [0.0, others],
        10.0,
    )


def make_rounds():
    """Two chat and two code prompts; the machine halves its speed after two."""
    speeds = [("chat", 8.0, 4.0), ("code", 8.0, 5.0), ("chat", 16.0, 8.0), ("code", 16.0, 8.0)]
    return [make_round(number, *speed) for number, speed in enumerate(speeds)]


def make_report(rounds):
    return Report(
        "An abacus",
        summarize(VARIANTS, rounds, CALIBRATION),
        rounds,
        [variant.name for variant in VARIANTS],
        {"chat": "real ones (MIT)"},
        {"Model": "tiny"},
        {"CPU": "abacus"},
        "vllm-medusa bench tiny heads",
    )


def test_speed_leaves_the_prefill_out():
    assert decoding_speed([generation(4.0)]) == 2.0
    assert overall_speed([generation(4.0)]) == pytest.approx(9 / 5)


def test_speed_of_a_batch_counts_from_when_all_are_decoding():
    early = Generation([7] * 5, [1, 2, 4, 5], [1.0, 2.0, 3.0, 4.0])
    late = Generation([7] * 3, [1, 3], [2.0, 4.0])
    # At 2 seconds 2 and 1 of the tokens are known; 5 more come within 2 seconds.
    assert decoding_speed([early, late]) == 2.5
    assert overall_speed([early, late]) == 2.0


def test_an_answer_of_one_token_has_no_speed():
    only = Generation([7], [1], [1.0])
    assert math.isnan(decoding_speed([only]))
    assert math.isnan(tokens_per_step([only]))
    assert accepted_per_depth([only]) == []


def test_tokens_per_step_leaves_the_prefill_out():
    assert tokens_per_step([generation(4.0, tokens=9, steps=5)]) == 2.0
    assert tokens_per_step([generation(4.0), generation(4.0)]) == 1.0


def test_accepted_per_depth():
    answer = Generation([7] * 9, [1, 2, 5, 7, 9], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert accepted_per_depth([answer]) == [0.75, 0.25]
    assert accepted_per_depth([generation(4.0)]) == []


def test_ratios_are_taken_round_by_round():
    rows = summarize(VARIANTS, make_rounds(), CALIBRATION)
    assert [(row.variant, row.kind) for row in rows] == [
        (name, kind) for kind in (ALL, "chat", "code") for name in ("plain vLLM", "tree")
    ]
    plain, tree = rows[:2]
    assert plain.speed_up == Spread(1.0, 1.0, 1.0)
    assert tree.speed_up.median == 2.0
    assert rows[-1].speed_up.median == pytest.approx((8 / 5 + 2) / 2)
    assert tree.tokens_per_step == 2.0
    # Of the whole request: 9 seconds against 5, 6, and twice 17 against 9.
    assert tree.speed_up_whole.median == pytest.approx((9 / 5 + 17 / 9) / 2)
    assert tree.milliseconds_to_first_token == 1000
    # Steps of 1, 1.25 and twice 2 seconds; 8 tokens each.
    assert tree.milliseconds_per_step == pytest.approx(1e3 * (1.25 + 2) / 2)
    assert tree.milliseconds_per_token == pytest.approx(1e3 * (5 / 8 + 1) / 2)


def test_settings_are_kept_apart():
    rounds = [
        make_round(0, "chat", 8.0, 4.0),
        make_round(1, "chat", 8.0, 8.0, temperature=1.0),
        make_round(2, "chat", 8.0, 2.0, at_once=4),
    ]
    trees = [row for row in summarize(VARIANTS, rounds, CALIBRATION) if row.variant == "tree"]
    assert [row.speed_up.median for row in trees] == [2.0, 1.0, 4.0]
    assert [row.answers for row in trees] == [1, 1, 4]


def test_identical_texts_are_counted():
    plain, tree = summarize(VARIANTS, make_rounds(), CALIBRATION)[:2]
    assert (plain.identical, tree.identical) == (4, 3)


def test_bound_and_prediction():
    options = {"method": "medusa", "lookup": False}
    calibrated = Variant("tree", options, 3, calibrated=True)
    _, row = summarize([PLAIN, calibrated], [make_round(1, "chat", 8.0, 4.0)], CALIBRATION)
    assert row.bound == pytest.approx(2.0 / (0.08 / 0.05))
    assert row.predicted == pytest.approx(1.8 / (0.08 / 0.05))
    # At 4 requests the schedule takes one node.
    rounds = [make_round(1, "chat", 8.0, 4.0, at_once=4)]
    _, row = summarize([PLAIN, calibrated], rounds, CALIBRATION)
    assert row.bound == pytest.approx(2.0 / 1.5)
    assert row.predicted == pytest.approx(1.5 / 1.5)
    # Without calibration, and for what is not calibrated, there is none.
    _, row = summarize([PLAIN, calibrated], rounds, Calibration())
    assert (row.bound, row.predicted) == (None, None)
    _, row = summarize([PLAIN, Variant("ngram", {})], rounds, CALIBRATION)
    assert (row.bound, row.predicted) == (None, None)


def test_spread():
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.5, 2.5)
    assert spread([3.0, math.nan]) == Spread(3.0, 3.0, 3.0)
    assert math.isnan(spread([]).median)


def test_every_cell_has_a_heading():
    report = make_report(make_rounds())
    headings, lines = overview(report)
    assert len(lines) == 2
    assert all(len(line) == len(headings) for line in lines)
    assert headings[6:8] == ("chat", "code")
    assert lines[1][-1] == "3 of 4"
    assert all(len(line) == len(DETAIL_HEADINGS) for line in details(report))


def test_page():
    page = markdown(make_report(make_rounds()))
    assert "| tree | 0 | 1 | 1.3 | 2.00 | 1.90-2.00 | 2.00 | 1.80 |" in page
    assert "| CPU | abacus |" in page
    assert "| Prompts, chat | real ones (MIT) |" in page
    assert "vllm-medusa bench tiny heads" in page


def test_disturbed_rounds_are_owned_up_to():
    rounds = make_rounds()
    assert "No round was disturbed" in explanation(make_report(rounds))
    rounds[0] = make_round(0, "chat", 8.0, 4.0, others=0.5)
    assert "In 1 of 4 rounds" in explanation(make_report(rounds))


def test_saved_files(tmp_path):
    pytest.importorskip("matplotlib")
    rounds = [*make_rounds(), make_round(4, "chat", 8.0, 4.0, temperature=1.0, others=0.5)]
    only = Generation([7], [1], [1.0])
    rounds.append(Round("short", "code", 1.0, [[only], [only]], [0.0, 0.0], 1.0))
    page, numbers, picture = (tmp_path / "out" / name for name in ("a.md", "a.json", "a.png"))
    save(make_report(rounds), page, numbers, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    saved = json.loads(numbers.read_text(), parse_constant=pytest.fail)  # no NaN: that is no JSON
    assert saved["rounds"][0]["variants"]["tree"]["tokens_per_step"] == 2.0
    assert saved["rows"][1]["variant"] == "tree"
    assert page.read_text().startswith("# An abacus")


def test_a_step_is_split_into_its_parts():
    parts = [
        ({"step": 0.05, "forward": 0.03, "LM head": 0.01}, {"step": step, "drafting": 0.01})
        for step in (0.06, 0.08, 0.1, 0.12)
    ]
    made = zip(make_rounds(), parts, strict=True)
    rounds = [replace(each, parts=list(both)) for each, both in made]
    page = markdown(make_report(rounds)).splitlines()
    headings, *_ = [line for line in page if "the rest" in line]
    assert headings.split(" | ")[3:7] == ["ms/step", "forward", "LM head", "drafting"]
    assert step_split(make_report(rounds)) == [
        ("plain vLLM", "0", "1", "50.0", "30.0", "10.0", "0.0", "10.0"),
        ("tree", "0", "1", "90.0", "0.0", "0.0", "10.0", "80.0"),
    ]
    # Rounds of an earlier version have none.
    assert step_split(make_report(make_rounds())) == []
    assert "Where a step" not in markdown(make_report(make_rounds()))


def test_calibration_file(tmp_path):
    assert read_calibration(tmp_path) == Calibration()
    stored = {
        "num_speculative_tokens": 1,
        "num_speculative_tokens_per_batch_size": [[1, 4, 1], [5, 5, 0]],
        "tokens_per_step": [1.0, 1.5],
        "costs": {"1": {"0": 0.05, "1": 0.06}, "4": {"0": 0.08, "1": 0.1}},
        "paths": [[0]],
    }
    (tmp_path / "medusa_tree.json").write_text(json.dumps(stored))
    read = read_calibration(tmp_path)
    assert [read.nodes_at(size) for size in (1, 4, 5, 64)] == [1, 1, 0, 0]
    assert read.cost(1, 1) == pytest.approx(1.2)
    assert read.cost(1, 3) == read.cost(1, 4) == pytest.approx(1.25)
    assert read.cost(1, 5) is None
    assert read.cost(2, 1) is None
    assert [read.tokens_per_step(nodes) for nodes in (0, 1, 2)] == [1.0, 1.5, None]
    # Trees that never pay are stored too.
    (tmp_path / "medusa_tree.json").write_text('{"num_speculative_tokens": 0, "paths": [[0]]}')
    assert read_calibration(tmp_path).nodes_at(1) == 0
    (tmp_path / "medusa_tree.json").write_text("[[0]]")
    assert read_calibration(tmp_path) == Calibration()


def test_what_calibrate_wrote_is_understood():
    """The shipped heads' own file."""
    read = read_calibration(Path(__file__).parents[2] / "heads" / "smollm2-135m-instruct")
    assert read.nodes_at(1) == read.nodes >= 1
    assert read.nodes_at(64) == 0
    assert 1 < read.cost(read.nodes, 1) < read.tokens_per_step(read.nodes) < 4
    assert read.best_chain() >= 1


def test_the_bound_takes_the_cost_that_calibrate_chose_by():
    """A slow moment without speculation must not make trees look cheap."""
    costs = {0: 3.0, 1: 1.0, 3: 2.0}
    read = Calibration(costs={1: costs})
    assert [read.cost(nodes, 1) for nodes in range(4)] == pytest.approx([1.0, 1.0, 1.5, 2.0])
    tokens = [1.0, 1.4, 1.6, 1.75]
    bounds = [rate / read.cost(nodes, 1) for nodes, rate in enumerate(tokens)]
    assert bounds == pytest.approx(gains(tokens, costs))


def test_best_chain():
    # One node: 1.5 / 1.2; two: 1.7 / 1.4.
    assert CALIBRATION.best_chain() == 1
    cheap = {1: {0: 1.0, 1: 1.2, 2: 1.21}}
    assert Calibration(accuracies=[[0.5], [0.4]], costs=cheap).best_chain() == 2
    assert Calibration(accuracies=[[0.5], [0.4]]).best_chain() == 1


def test_variants(tmp_path):
    assert chain_variant(tmp_path, 2).speculative_config == {
        "method": "medusa",
        "model": str(tmp_path),
        "tree": "chain",
        "num_speculative_tokens": 2,
        "lookup": False,
    }
    served = {"method": "medusa", "model": str(tmp_path)}
    assert tree_variant(tmp_path, Calibration()).name == "tree"
    assert tree_variant(tmp_path, Calibration(nodes=2)).name == "tree of 2"
    chosen = tree_variant(tmp_path, CALIBRATION)
    assert (chosen.name, chosen.speculative_config) == ("calibrated tree", served)
    alone = heads_only(chosen)
    assert alone.name == "calibrated tree, heads only"
    assert alone.speculative_config == served | {"lookup": False}
    assert (is_heads_only(alone), is_heads_only(chosen)) == (True, False)
    first = tree_variant(tmp_path, CALIBRATION, nodes=2)
    assert (first.name, first.calibrated) == ("tree of 2", False)
    assert first.speculative_config == served | {"num_speculative_tokens": 2}
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"paths": [[0], [1], [2]], "num_speculative_tokens": 2}))
    [own] = file_variants(tmp_path, [file])
    assert own.name == "mine of 2"
    assert own.speculative_config == served | {"tree": [[0], [1]]}
