"""The benchmark's picture: the speed-up of every group of prompts, by variant and set."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_medusa.bench.generation import decoding_speed
from vllm_medusa.bench.rounds import Round
from vllm_medusa.picture import COLOURS, picture


def draw(
    rounds: Sequence[Round], variants: Sequence[str], title: str, subtitle: str, path: Path
) -> None:
    """A panel for each temperature and concurrency, saved as PNG.

    In a panel: sets from left to right, a dot for every round, a line at each variant's median.
    Hollow dots are disturbed rounds.
    """
    settings = list(dict.fromkeys((each.concurrency, each.temperature) for each in rounds))
    columns = min(3, len(settings))
    lines = -(-len(settings) // columns)
    size = (max(7, 5 * columns), 1 + 3.5 * lines)
    with picture(path, lines, columns, figsize=size, sharey=True) as axes:
        for number, panel in enumerate(axes.flat):
            if number >= len(settings):
                panel.set_visible(False)
                continue
            concurrency, temperature = settings[number]
            chosen = [r for r in rounds if (r.concurrency, r.temperature) == settings[number]]
            draw_panel(panel, chosen, variants)
            panel.set_title(
                f"{concurrency} at once, temperature {temperature:g}", fontsize="medium"
            )
        for panel in axes[:, 0]:
            panel.set_ylabel(f"decoding speed / {variants[0]}")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure = axes[0, 0].figure
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        figure.suptitle(f"{title}\n{subtitle}")


def draw_panel(panel: Any, rounds: Sequence[Round], variants: Sequence[str]) -> None:
    """Dots and medians of one temperature and concurrency."""
    kinds = list(dict.fromkeys(each.kind for each in rounds))
    width = 0.8 / max(1, len(variants) - 1)
    for index in range(1, len(variants)):
        colour = COLOURS[(index - 1) % len(COLOURS)]
        for place, kind in enumerate(kinds):
            own = [each for each in rounds if each.kind == kind]
            ratios = [
                decoding_speed(each.batches[index]) / decoding_speed(each.batches[0])
                for each in own
            ]
            left = place - 0.4 + (index - 1) * width
            places = [left + width * (n + 1) / (len(own) + 1) for n in range(len(own))]
            panel.scatter(
                places,
                ratios,
                s=18,
                edgecolors=colour,
                facecolors=["none" if each.disturbed else colour for each in own],
                label=variants[index] if place == 0 else None,
            )
            known = [ratio for ratio in ratios if ratio == ratio]
            if known:
                panel.hlines(statistics.median(known), left, left + width, colour, linewidth=2)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xticks(range(len(kinds)), kinds)
