"""What all pictures have in common."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Of the colour-blind safe palette by Okabe and Ito.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")


@contextlib.contextmanager
def picture(path: Path, rows: int = 1, columns: int = 1, **options: Any) -> Iterator[Any]:
    """Draw a picture; it is saved as PNG at the end.

    Args:
        path: where to.
        rows, columns: of panels.
        options: of ``pyplot.subplots``.

    Yields:
        The panels, matplotlib axes [rows, columns]; the figure is ``axes[0, 0].figure``.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    for panel in axes.flat:
        panel.spines[["top", "right"]].set_visible(False)
    try:
        yield axes
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)
