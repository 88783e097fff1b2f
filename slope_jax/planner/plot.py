"""Draws what is predicted: time to first token against throughput, one curve per configuration and concurrency."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import matplotlib

matplotlib.use("Agg")  # writes files, and needs no display

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from slope_jax.planner.evaluate import Prediction
from slope_jax.planner.search import Answer, Plan

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # of Okabe and Ito
_MARKERS = ("o", "s", "D", "^", "v", "P")
_BASELINE = "#000000"
_COLUMNS = 3
_MOST_PROMPTS = 8
_CURVES = 5
_NUMBERED = (1, 2, 4, 8)
_ROOM = 13.0  # pixels that a number takes


def plot(plan: Plan, path: str | os.PathLike[str], curves: int = _CURVES) -> None:
    """Writes a PNG file with a panel for each length of prompts and a curve for each of the best meshes.

    A point is a number of prompts under way, which is written beside it. The curve of tensor parallelism, a replica on
    each node, is the baseline. A dotted line is the target.

    Args:
      plan: what was found.
      path: the file.
      curves: how many of the best meshes to draw, beside the baseline.
    """
    answers = plan.answers
    chosen = _chosen(answers, curves)
    columns = min(len(answers), _COLUMNS)
    rows = math.ceil(len(answers) / columns)
    width = max(1.6 + 3.8 * columns, 8.4)  # room for the title
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(width, 1.7 + 3.5 * rows), squeeze=False, layout="constrained"
    )
    for axes, answer in zip(grid.flat, answers, strict=False):
        _panel(axes, answer, chosen)
    for axes in list(grid.flat)[len(answers) :]:
        axes.set_visible(False)
    handles = [_handle(name, i) for i, name in enumerate(chosen)]
    if any(answer.baseline for answer in answers):
        size = plan.cluster.devices_per_node
        label = f"tensor parallelism over {size} devices, one replica per node"
        handles.append(Line2D([], [], color=_BASELINE, marker="x", linestyle="--", label=label))
    if any(answer.target_s is not None for answer in answers):
        handles.append(Line2D([], [], color="0.4", linestyle=":", label="target"))
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), max(1, int(width / 2.9))),
        frameon=False,
        fontsize=9,
        title="pp \N{MULTIPLICATION SIGN} ring \N{MULTIPLICATION SIGN} ulysses; EP, TP: experts or whole layers split "
        "over ulysses; numbers: prompts under way",
        title_fontsize=9,
    )
    legend.get_title().set_multialignment("center")
    cluster = plan.cluster
    figure.suptitle(
        f"Predicted prefill on {cluster.nodes} \N{MULTIPLICATION SIGN} {cluster.devices_per_node} {cluster.device}: "
        "meshes against tensor parallelism",
        fontsize=12,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def curve(prediction: Prediction, most: int = _MOST_PROMPTS) -> tuple[list[int], list[float], list[float]]:
    """Prompts under way, and for each number tokens per second and TTFT, as far as the memory holds their KV."""
    held = prediction.replicas * max(prediction.memory.prompts, 1)
    counts = [n for n in range(1, most + 1) if n <= held]
    ttft = [prediction.ttft_at(n) for n in counts]
    return counts, [prediction.num_tokens * prediction.rate_at(n) for n in counts], ttft


def _chosen(answers: Sequence[Answer], curves: int) -> list[str]:
    """The meshes to draw: the best of each number of stages of every length in turn, then the best of what is left.

    Meshes with equally many stages often are ties, whose curves lie on each other.
    """
    names: dict[str, None] = {}
    for answer in answers:
        names[_name(answer.best[0])] = None
    leading: list[list[Prediction]] = []
    for answer in answers:
        of_stages: dict[int, Prediction] = {}
        for prediction in answer.best:
            of_stages.setdefault(prediction.layout.shape.pp, prediction)
        leading.append(list(of_stages.values()))
    for found in (leading, [list(answer.best) for answer in answers]):
        for place in range(max(map(len, found))):
            for best in found:
                if place < len(best) and len(names) < curves:
                    names[_name(best[place])] = None
    return list(names)


def _name(prediction: Prediction) -> str:
    mesh = str(prediction.layout).replace("x", " \N{MULTIPLICATION SIGN} ")
    return mesh if prediction.replicas == 1 else f"{prediction.replicas} replicas of {mesh}"


def _handle(name: str, place: int) -> Line2D:
    color, marker = _COLORS[place % len(_COLORS)], _MARKERS[place % len(_MARKERS)]
    return Line2D([], [], color=color, marker=marker, markersize=5, linewidth=1.4, label=name)


def _panel(axes: Axes, answer: Answer, chosen: Sequence[str]) -> None:
    by_name = {_name(p): p for p in answer.best}
    drawn = [(by_name[name], _handle(name, i)) for i, name in enumerate(chosen) if name in by_name]
    if answer.baseline is not None:
        drawn.append((answer.baseline, Line2D([], [], color=_BASELINE, marker="x", linestyle="--", linewidth=1.4)))
    points: list[tuple[int, float, float]] = []
    for prediction, style in drawn:
        counts, throughput, ttft = curve(prediction)
        axes.plot(
            throughput,
            ttft,
            color=style.get_color(),
            marker=style.get_marker(),
            linestyle=style.get_linestyle(),
            markersize=5,
            linewidth=1.4,
        )
        points += [(n, x, y) for n, x, y in zip(counts, throughput, ttft, strict=True) if n in _NUMBERED]
    if answer.target_s is not None:
        axes.axhline(answer.target_s, color="0.4", linestyle=":", linewidth=1.4, zorder=0)
    axes.set_title(f"{answer.num_tokens:,} tokens", fontsize=11)
    axes.set_xlabel("throughput (1000 tokens/s)")
    axes.set_ylabel("mean time to first token (s)")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}"))
    axes.margins(0.1)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    _number(axes, points)


def _number(axes: Axes, points: Sequence[tuple[int, float, float]]) -> None:
    """Writes numbers beside points, where there is room for them."""
    written: list[tuple[float, float]] = []
    for number, x, y in points:
        place = tuple(axes.transData.transform((x, y)))
        if any(abs(place[0] - a) < _ROOM and abs(place[1] - b) < _ROOM for a, b in written):
            continue
        written.append((place[0], place[1]))
        text = axes.annotate(str(number), (x, y), xytext=(6, -3), textcoords="offset points", fontsize=7)
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
