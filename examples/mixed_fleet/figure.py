"""The demo's picture: five curves per experiment, and the sampler groups."""

from __future__ import annotations

import io
from pathlib import Path

import matplotlib
from PIL import Image

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator, NullFormatter

from .experiments import Experiment, Plan
from .report import GROUPS_SHOWN, Results, group_totals, mean
from .train import History

INK, FAINT = "#24292f", "#8c959f"
COLORS = {
    "on-policy control": "#8c959f",
    "uncorrected": "#d1495b",
    "GRPO": "#d1495b",
    "GRPO + top-p": "#d1495b",
    "MIS": "#e09f3e",
    "SC": "#3d7ea6",
    "SC + MIS": "#2a7f62",
    "SC + MIS + top-p": "#2a7f62",
}
PANELS = (
    ("reward", "evaluations", "Reward", "share of answers right"),
    ("kl_k3", "updates", "Sampler–trainer KL", "nats per token, log scale"),
    ("entropy", "evaluations", "Entropy", "nats per token"),
    ("gradient_norm", "updates", "Gradient norm", "log scale"),
    ("out_of_band", "updates", "Outside [0.2, 5]", "share of tokens"),
)
SMOOTHING = 11
"""Updates in the centered running mean that curves of single batches are drawn with."""


def smooth(values: list[float]) -> list[float]:
    """Centered running mean, shorter at the ends."""
    half = SMOOTHING // 2
    return [mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def curve(history: History, name: str, kind: str) -> tuple[list[float], list[float]]:
    """Updates and values of one number, smoothed where it comes from single batches."""
    rows = history.updates if kind == "updates" else history.evaluations
    values = [row[name] for row in rows]
    return [row["update"] for row in rows], smooth(values) if kind == "updates" else values


def log_scale(axis: Axes) -> None:
    """A logarithmic axis whose labels are plain numbers."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def draw_curves(axes: list[Axes], experiment: Experiment, arms: dict[str, list[History]]) -> None:
    """One row of panels: a thick line for the mean over seeds, a faint one for each seed."""
    for axis, (name, kind, title, subtitle) in zip(axes, PANELS, strict=True):
        for arm, histories in arms.items():
            if arm == "on-policy control" and name in ("kl_k3", "out_of_band"):
                continue  # zero by construction
            style = (0, (3, 1.2)) if "top-p" in arm else "-"
            runs = [curve(history, name, kind) for history in histories]
            for x, y in runs if len(runs) > 1 else []:
                axis.plot(x, y, linestyle=style, color=COLORS[arm], alpha=0.3, linewidth=0.9)
            average = [mean(list(column)) for column in zip(*(y for _, y in runs), strict=True)]
            axis.plot(runs[0][0], average, linestyle=style, color=COLORS[arm], linewidth=2.1, label=arm)
        if "log" in subtitle:
            log_scale(axis)
        if name == "out_of_band":
            axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
        axis.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=21)
        axis.text(0, 1.035, subtitle, transform=axis.transAxes, fontsize=10, color=FAINT)
        axis.set_xlim(0, experiment.budget.steps)
        axis.set_xlabel("updates", fontsize=10, color=FAINT, labelpad=2)
        axis.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    for axis in (axes[0], axes[2], axes[4]):
        axis.set_ylim(bottom=0)


def draw_groups(axis: Axes, experiment: Experiment, arms: dict[str, list[History]]) -> None:
    """Bars by sampler group: share of tokens, and share of out-of-band tokens under two arms."""
    groups = next(arm.groups for arm in experiment.arms if arm.name == GROUPS_SHOWN[0])
    totals = [group_totals(arms[arm]) for arm in GROUPS_SHOWN]
    series = [("share of all tokens", "#c9d1d9", [totals[0][group.name]["token_share"] for group in groups])]
    for arm, total in zip(GROUPS_SHOWN, totals, strict=True):
        shares = [total[group.name]["out_of_band_share"] for group in groups]
        series.append((f"share of tokens outside [0.2, 5], {arm}", COLORS[arm], shares))
    for s, (label, color, heights) in enumerate(series):
        offsets = [g + 0.27 * (s - 1) for g in range(len(groups))]
        bars = axis.bar(offsets, heights, width=0.25, color=color, label=label)
        axis.bar_label(
            bars, [f"{100 * height:.0f}" for height in heights], fontsize=10.5, color=INK, padding=2
        )
    labels = [f"{group.name.replace(' 6000', '')}\nlag {group.lag}" for group in groups]
    axis.set_xticks(range(len(groups)), labels)
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.margins(x=0.01, y=0.12)
    axis.legend(frameon=False, fontsize=11.5, loc="upper right")


def draw_row(row: SubFigure, head: str, experiment: Experiment, arms: dict[str, list[History]]) -> None:
    """One experiment: a heading, the arms' colors, and its five panels."""
    axes = list(row.subplots(1, len(PANELS)))
    row.subplots_adjust(left=0.042, right=0.99, bottom=0.13, top=0.66, wspace=0.3)
    row.suptitle(head, x=0.008, y=0.985, ha="left", fontsize=15.5, fontweight="bold")
    draw_curves(axes, experiment, arms)
    handles, labels = axes[0].get_legend_handles_labels()
    row.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(0.0, 0.92),
        ncols=len(labels),
        frameon=False,
        fontsize=12,
        columnspacing=1.4,
    )


def draw(plan: Plan, results: Results) -> Figure:
    """The whole picture: a row for each experiment, and one for the sampler groups."""
    style = {"font.size": 11, "text.color": INK, "axes.edgecolor": "#c9d1d9", "axes.axisbelow": True}
    seeds = len(plan.learning.seeds)
    heads = (
        "Drift: every token gets the same advantage, so an unbiased update stays where it is",
        "Learning: group-mean advantages"
        + (f", mean of {seeds} seeds (each one faint)" if seeds > 1 else ""),
    )
    with plt.rc_context(style):
        figure = plt.figure(figsize=(15, 12), facecolor="white")
        rows = figure.subfigures(3, 1, height_ratios=[1, 1, 0.72])
        for row, experiment, head in zip(rows, plan.experiments, heads, strict=False):
            draw_row(row, head, experiment, results[experiment.name])
        axis = rows[2].subplots(1, 1)
        rows[2].subplots_adjust(left=0.01, right=0.99, bottom=0.17, top=0.84)
        rows[2].suptitle(
            "Which sampler group hurts, %", x=0.008, y=0.97, ha="left", fontsize=15.5, fontweight="bold"
        )
        draw_groups(axis, plan.learning, results["learning"])
        for panel in figure.get_axes():
            panel.spines[["top", "right"]].set_visible(False)
            panel.tick_params(colors="#57606a", labelsize=10.5, length=0)
    return figure


def save(path: Path, plan: Plan, results: Results) -> None:
    """Draw the picture into a PNG."""
    figure, buffer = draw(plan, results), io.BytesIO()
    figure.savefig(buffer, dpi=105)
    plt.close(figure)
    Image.open(buffer).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the size
