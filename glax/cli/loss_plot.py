"""Draw the loss curve."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from glax._src.core.files import replacing

SMOOTHED_OVER = 50


def save_plot(path: Path, losses: Sequence[float], held_out: dict[int, float], baseline: float, title: str):
    """Write the loss curve as a picture.

    losses: one per step. held_out: by step. baseline: the order-2 model's loss on the held-out text. All are in bits per byte.
    """
    figure = Figure(
        figsize=(8, 4.5), layout="constrained"
    )  # without pyplot, which needs a display and has global state
    axes = figure.add_subplot()
    steps = np.arange(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
    window = min(SMOOTHED_OVER, len(losses))
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    axes.plot(steps[window - 1 :], smooth, color="tab:blue", label=f"training, mean of {window} steps")
    axes.plot(list(held_out), list(held_out.values()), "o", color="tab:orange", label="held out")
    axes.axhline(baseline, color="tab:gray", linestyle="--", label=f"order-2 model, held out: {baseline:.2f}")
    axes.set(xlabel="step", ylabel="bits per byte", title=title, ylim=(0, None))
    axes.legend()
    with replacing(path) as new:
        figure.savefig(new, dpi=150)
