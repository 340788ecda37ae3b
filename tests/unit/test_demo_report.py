"""The demo's numbers: pairing, medians, table and page, from made-up generations."""

import json
import math
from typing import ClassVar

import pytest

from vllm_medusa.demo.engine import Engine, Generation, Variant, tokens_per_step
from vllm_medusa.demo.measure import MAX_REPEATS, Round, measure
from vllm_medusa.demo.picture import draw
from vllm_medusa.demo.prompts import Prompt
from vllm_medusa.demo.report import (
    HEADINGS,
    Report,
    Spread,
    as_json,
    cells,
    explanation,
    markdown,
    spread,
    summarize,
)
from vllm_medusa.demo.run import medusa_variants

VARIANTS = [Variant("plain", None), Variant("tree", {"method": "medusa"})]


def generation(seconds, tokens=9, steps=9, others=0.0, text=7):
    """`tokens` tokens in `steps` steps: one second of prefill, the others in `seconds`."""
    counts = [1 + round(step * (tokens - 1) / (steps - 1)) for step in range(steps)]
    times = [1 + step * seconds / (steps - 1) for step in range(steps)]
    return Generation([text] * tokens, counts, times, others)


def make_rounds():
    """Two chat and two code prompts; the machine halves its speed after two."""
    speeds = [("chat", 8.0, 4.0), ("code", 8.0, 5.0), ("chat", 16.0, 8.0), ("code", 16.0, 8.0)]
    return [
        Round(
            Prompt(f"prompt {number}", kind, "text"),
            [generation(plain), generation(tree, steps=5, text=7 if number else 8)],
        )
        for number, (kind, plain, tree) in enumerate(speeds)
    ]


def make_report(rounds, by_nodes=None):
    disturbed = sum(each.disturbed for each in rounds)
    rows = summarize(VARIANTS, rounds)
    return Report(rows, len(rounds), disturbed, {"CPU": "abacus"}, by_nodes or {})


def test_speed_leaves_the_prefill_out():
    assert generation(seconds=4.0).tokens_per_second == 2.0


def test_tokens_per_step_leaves_the_prefill_out():
    assert tokens_per_step([generation(4.0, tokens=9, steps=5)]) == 2.0
    assert tokens_per_step([generation(4.0), generation(4.0)]) == 1.0


def test_ratios_are_taken_prompt_by_prompt():
    plain, tree = summarize(VARIANTS, make_rounds())
    assert plain.ratio == Spread(1.0, 1.0, 1.0)
    assert tree.ratio.median == 2.0
    assert tree.ratio_code.median == pytest.approx((8 / 5 + 2) / 2)
    assert tree.tokens_per_step == 2.0
    # Of the whole request: 9 seconds against 5, 6, and twice 17 against 9.
    assert tree.ratio_with_prefill.median == pytest.approx((9 / 5 + 17 / 9) / 2)


def test_identical_texts_are_counted():
    plain, tree = summarize(VARIANTS, make_rounds())
    assert (plain.identical, tree.identical) == (4, 3)


def test_spread():
    assert spread([3.0, 1.0, 2.0]) == Spread(2.0, 1.5, 2.5)
    assert spread([3.0]) == Spread(3.0, 3.0, 3.0)
    assert math.isnan(spread([]).median)


def test_every_cell_has_a_heading():
    table = cells(make_report(make_rounds()))
    assert all(len(row) == len(HEADINGS) for row in table)
    assert table[1][-1] == "3 of 4"


def test_page_holds_table_machine_and_tree_sizes():
    page = markdown(make_report(make_rounds(), {1: 1.25, 63: 1.75}))
    assert "| tree | 1.3 | 2.00 |" in page
    assert "| nodes | 1 | 63 |\n|---|---|---|\n| tokens/step | 1.25 | 1.75 |" in page
    assert "| CPU | abacus |" in page
    assert "Tokens per step" not in markdown(make_report(make_rounds()))


def test_disturbed_rounds_are_owned_up_to():
    rounds = make_rounds()
    assert "No round was disturbed" in explanation(make_report(rounds))
    rounds[0].generations[1] = generation(4.0, others=0.5)
    assert "In 1 of 4 rounds" in explanation(make_report(rounds))


def test_numbers_can_be_written_as_json():
    rounds = make_rounds()
    saved = json.loads(json.dumps(as_json(make_report(rounds), rounds)))
    assert saved["rounds"][0]["variants"]["tree"]["tokens_per_step"] == 2.0
    assert saved["rows"][1]["name"] == "tree"


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    rounds = make_rounds()
    draw(make_report(rounds), rounds, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


class FakeEngine(Engine):
    """Answers at once, and notes who was asked; the load beside it follows a script."""

    asked: ClassVar[list[str]] = []
    loads: ClassVar[list[float]] = []

    def generate(self, texts, max_tokens):
        self.asked.append(self.variant.name)
        return [generation(4.0, others=self.loads.pop(0) if self.loads else 0.0)]


@pytest.fixture
def engines(monkeypatch):
    monkeypatch.setattr(FakeEngine, "asked", [])
    monkeypatch.setattr(FakeEngine, "loads", [])
    return [FakeEngine(Variant(name, None), model="") for name in "abc"]


def prompts(count):
    return [Prompt(f"prompt {number}", "chat", "text") for number in range(count)]


def test_the_order_rotates(engines):
    measure(engines, prompts(3), lambda _: None)
    assert "".join(FakeEngine.asked) == "abcbcacab"


def test_a_disturbed_round_is_repeated_and_the_calmest_kept(engines):
    FakeEngine.loads = [0.0, 0.9, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0, 0.05]
    [result] = measure(engines, prompts(1), lambda _: None)
    assert len(FakeEngine.asked) == 9
    assert result.others == 0.05
    assert not result.disturbed


def test_a_busy_machine_does_not_hold_the_demo_up(engines):
    FakeEngine.loads = [1.0] * 1000
    results = measure(engines, prompts(2), lambda _: None)
    assert len(FakeEngine.asked) == 3 * (2 + MAX_REPEATS)
    assert all(result.disturbed for result in results)


def test_variants_name_the_nodes_they_verify(tmp_path):
    def names(tree_nodes=None):
        return [variant.name for variant in medusa_variants(tmp_path, 2, tree_nodes)]

    assert names() == ["plain vLLM", "chain of 2", "tree"]
    stored = {"num_speculative_tokens": 2, "paths": [[0], [1], [0, 0]]}
    (tmp_path / "medusa_tree.json").write_text(json.dumps(stored))
    assert names() == ["plain vLLM", "chain of 2", "tree of 2"]
    assert names(tree_nodes=3)[-1] == "tree of 3"
    assert medusa_variants(tmp_path, 2, 3)[-1].speculative_config == {
        "method": "medusa",
        "model": str(tmp_path),
        "num_speculative_tokens": 3,
    }
