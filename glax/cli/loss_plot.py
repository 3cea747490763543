"""Draw the losses of a training run."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from glax._src.core.files import replacing
from glax.models.training import History

SMOOTHED_OVER = 50  # steps


def save_plot(path: Path, history: History, baseline: float | None = None, title: str = "", bits: bool = False):
    """Write a picture of the losses by step: each step's and their mean over SMOOTHED_OVER steps, and those held out.

    bits: whether the picture is in bits per byte instead of nats per token. baseline: another model's loss on the held-out text,
    in the unit of the picture.
    """
    scale = np.log(2) if bits else 1.0
    # without pyplot, which needs a display and has global state
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps, losses = np.array(list(history.losses)), np.array(list(history.losses.values())) / scale
    if len(losses):
        axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training, each step")
        window = min(SMOOTHED_OVER, len(losses))
        smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        axes.plot(steps[window - 1 :], smooth, color="tab:blue", label=f"training, mean of {window} steps")
    held_out = [loss / scale for loss in history.held_out.values()]
    axes.plot(list(history.held_out), held_out, "o", color="tab:orange", label="held out")
    if baseline is not None:
        axes.axhline(baseline, color="tab:gray", linestyle="--", label=f"order-2 model, held out: {baseline:.2f}")
    unit = "bits per byte" if bits else "nats per token"
    axes.set(xlabel="step", ylabel=unit, title=title, ylim=(0, None))
    axes.legend()
    with replacing(path) as new:
        figure.savefig(new, dpi=150)
