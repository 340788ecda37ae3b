"""The calibration's picture: tokens per step and predicted gain by nodes, nodes by batch size."""

from __future__ import annotations

from pathlib import Path

from vllm_medusa.calibration.record import Calibration
from vllm_medusa.calibration.schedule import gains
from vllm_medusa.picture import COLOURS, picture


def draw(result: Calibration, path: Path) -> None:
    """Save the picture as PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib import colormaps

    with picture(path, columns=3, figsize=(13, 4)) as [[tokens, gain, nodes]]:
        tokens.plot(range(len(result.tokens)), result.tokens, color=COLOURS[0])
        tokens.set(xlabel="nodes", ylabel="tokens per step", title="Replayed on held-out text")
        shades = colormaps["viridis"]
        for index, cost in enumerate(result.costs):
            curve = gains(result.tokens, cost.seconds())
            colour = shades(index / max(len(result.costs) - 1, 1) * 0.9)
            gain.plot(range(len(curve)), curve, color=colour, label=f"batch size {cost.batch_size}")
        gain.axhline(1, color="grey", linewidth=0.8)
        gain.set(xlabel="nodes", ylabel="predicted gain", title="Over no speculation")
        gain.legend(frameon=False, fontsize="small")
        sizes = result.sizes()
        places = range(len(sizes))
        nodes.bar(places, list(sizes.values()), color=COLOURS[2])
        nodes.set_xticks(list(places), [str(size) for size in sizes])
        nodes.set(xlabel="batch size", ylabel="nodes", title="Chosen")
