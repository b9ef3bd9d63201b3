"""The plot of a training: the loss, and held-out acceptance by position. Knows the metrics file alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ...extras import install

SMOOTHING = 50  # points of the loss curve, each an average over a stretch of steps


def draw(metrics: Path, picture: Path, title: str, axis: str, positions: Sequence[int]) -> str:
    """Draw training.jsonl into a file. Returns a line that names the file or the missing library."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return f"no plot: it needs matplotlib ({install('train')})"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    measured = [row for row in rows if "greedy" in row]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    size = max(1, len(losses) // SMOOTHING)
    groups = [losses[start : start + size] for start in range(0, len(losses), size)]
    left.plot([group[-1][0] for group in groups], [sum(loss for _, loss in group) / len(group) for group in groups])
    left.set(xlabel="step", ylabel="loss", title=title)
    for index, number in enumerate(positions):
        steps = [row["step"] for row in measured]
        right.plot(steps, [row["greedy"][index] for row in measured], marker=".", label=f"{axis} {number}")
    right.set(xlabel="step", ylabel="accepted at temperature 0", title="held-out text, teacher-forced", ylim=(0, 1))
    right.legend()
    figure.savefig(picture, dpi=120)
    return f"plot: {picture}"
