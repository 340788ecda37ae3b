"""The demo's picture: speed and tokens per step, prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_medusa.demo.measure import Round
from vllm_medusa.demo.report import Report

# Blue, orange, green of the colour-blind safe palette by Okabe and Ito.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")


def draw(report: Report, rounds: Sequence[Round], path: Path) -> None:
    """Bars of the decoding speed for every prompt, one colour per variant, saved as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    width = 0.8 / len(report.rows)
    for index, row in enumerate(report.rows):
        speeds = [each.generations[index].tokens_per_second for each in rounds]
        places = [place + index * width for place in range(len(rounds))]
        label = f"{row.name}: {row.ratio.median:.2f}x, {row.tokens_per_step:.2f} tokens per step"
        axes.bar(places, speeds, width, label=label, color=COLOURS[index % len(COLOURS)])
    middle = 0.4 - width / 2
    axes.set_xticks([place + middle for place in range(len(rounds))])
    names = [f"{each.prompt.name}{' *' if each.disturbed else ''}" for each in rounds]
    axes.set_xticklabels(names, rotation=30, ha="right")
    axes.set_ylabel("tokens per second, decoding")
    axes.set_title(f"SmolLM2-135M-Instruct, float32, batch 1, {report.machine['CPU']}")
    # Above the bars, so that it hides none.
    axes.set_ylim(top=axes.get_ylim()[1] * 1.3)
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    if any(each.disturbed for each in rounds):
        figure.supxlabel("* other processes were busy meanwhile", fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
