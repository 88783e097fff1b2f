"""Draws measured prefills: time to first token against throughput."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # writes files, and needs no display

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # of Okabe and Ito
_MARKERS, _DASHES = "osD^", ("-", "--", "-.", ":")
_COLUMNS = 3
_EXPLANATION = (
    "meshes: pp \N{MULTIPLICATION SIGN} ring \N{MULTIPLICATION SIGN} ulysses; "
    "numbers: prompts at once; bars: up to the 99th percentile"
)

Row = dict[str, Any]
Line = tuple[str, str, str]  # mesh, expert weights, parallelism


def plot(rows: Iterable[Row], path: str) -> None:
    """Writes a PNG file with a panel for each length of prompts and a line for each mesh.

    Kinds of expert weights and of parallelism have lines of their own.

    A point is a batch of as many prompts as the number beside it says: its median time to first token, with a bar up to
    the 99th percentile, against its throughput.

    Raises:
      ValueError: there is no prefill among the rows.
    """
    prefills = [row for row in rows if row["kind"] == "prefill"]
    if not prefills:
        raise ValueError("there is no prefill to plot")
    lengths = sorted({row["prompt_tokens"] for row in prefills})
    styles = _styles(prefills)
    columns = min(len(lengths), _COLUMNS)
    panels = math.ceil(len(lengths) / columns)
    width = 1.2 + 3.9 * columns
    figure, grid = pyplot.subplots(
        panels, columns, figsize=(width, 1.5 + 3.4 * panels), squeeze=False, layout="constrained"
    )
    for axes, length in zip(grid.flat, lengths, strict=False):
        _panel(axes, length, [row for row in prefills if row["prompt_tokens"] == length], styles)
    for axes in list(grid.flat)[len(lengths) :]:
        axes.set_visible(False)
    longest = max(len(style["label"]) for style in styles.values())
    legend = figure.legend(
        handles=[Line2D([], [], **style) for style in styles.values()],
        loc="outside lower center",
        ncols=min(len(styles), max(1, int(12 * width / (longest + 10)))),
        frameon=False,
        fontsize=9,
        title=_EXPLANATION if columns > 1 else _EXPLANATION.replace("; ", "\n", 1),
        title_fontsize=9,
    )
    legend.get_title().set_multialignment("center")
    figure.suptitle(_title(prefills), fontsize=12)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _styles(prefills: Sequence[Row]) -> dict[Line, dict[str, Any]]:
    """How each line is drawn: a colour for each mesh, a marker and a dash for each kind of experts and parallelism."""
    lines = list(dict.fromkeys(map(_line, prefills)))
    meshes, experts, parallelisms = (list(dict.fromkeys(column)) for column in zip(*lines, strict=True))
    kinds = list(dict.fromkeys(line[1:] for line in lines))

    def label(line: Line) -> str:
        mesh, expert_weights, parallelism = line
        parts = [mesh.replace("x", " \N{MULTIPLICATION SIGN} ")]
        parts += [f"{expert_weights} experts"] if len(experts) > 1 else []
        return ", ".join(parts + ([f"{parallelism} parallel"] if len(parallelisms) > 1 else []))

    return {
        line: {
            "label": label(line),
            "color": _COLORS[meshes.index(line[0]) % len(_COLORS)],
            "marker": _MARKERS[kinds.index(line[1:]) % len(_MARKERS)],
            "linestyle": _DASHES[kinds.index(line[1:]) % len(_DASHES)],
            "markersize": 5,
            "linewidth": 1.4,
        }
        for line in lines
    }


def _line(row: Row) -> Line:
    return row["mesh"], row["expert_weights"], row["parallelism"]


def _panel(axes: Axes, length: int, rows: Sequence[Row], styles: dict[Line, dict[str, Any]]) -> None:
    by_line: dict[Line, list[Row]] = defaultdict(list)
    for row in rows:
        by_line[_line(row)].append(row)
    for line, points in by_line.items():
        points = sorted(points, key=lambda row: row["concurrency"])
        throughput = [row["tokens_per_s"] for row in points]
        ttft = [row["ttft_median_s"] for row in points]
        above = [row["ttft_p99_s"] - row["ttft_median_s"] for row in points]
        color = to_rgba(styles[line]["color"], 0.5)
        axes.errorbar(
            throughput, ttft, yerr=([0.0] * len(above), above), ecolor=color, elinewidth=1, capsize=2, **styles[line]
        )
        for row, x, y in zip(points, throughput, ttft, strict=True):
            number = axes.annotate(
                str(row["concurrency"]), (x, y), xytext=(5, -10), textcoords="offset points", fontsize=8, zorder=5
            )
            number.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    axes.set_title(f"{length:,} tokens", fontsize=11)
    axes.set_xlabel("throughput (tokens/s)")
    axes.set_ylabel("time to first token (s)")
    axes.margins(0.12)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _title(prefills: Sequence[Row]) -> str:
    models, machines, dtypes = (
        ", ".join(dict.fromkeys(str(row[key]) for row in prefills)) for key in ("model", "device_kind", "dtype")
    )
    return f"Prefill of {models} on {machines}, {dtypes}"
