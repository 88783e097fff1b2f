"""The answers of the planner as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from slope_jax.planner.assumptions import Assumption, hangs_on
from slope_jax.planner.calibrate import Calibration
from slope_jax.planner.devices import QUANTITIES
from slope_jax.planner.evaluate import Prediction
from slope_jax.planner.operations import PARTS
from slope_jax.planner.search import MODEL_ERROR, Answer, Plan
from slope_jax.planner.solve import Requirement

_HEADS = ("", "pp x ring x u", "replicas", "chunks", "of tokens", "experts", "ring", "TTFT s", "req/s", "within target",
          "GB", "most time goes to")  # fmt: skip
_TEXT = {"", "pp x ring x u", "experts", "ring", "most time goes to"}  # columns that are aligned to the left
_REFUSED = 4
_ASSUMPTIONS = 8


def format_plan(
    plan: Plan,
    rows: int,
    assumed: Sequence[tuple[Assumption, ...]],
    solved: Sequence[tuple[Requirement, ...]] = (),
) -> str:
    """All answers, each with its best configurations, where the time of the first one goes, and what it hangs on.

    Args:
      plan: what was found.
      rows: configurations to show for each length.
      assumed: what the best configuration of each answer hangs on.
      solved: what would have to be true for the target of each answer; empty when that was not asked.
    """
    cluster = plan.cluster
    head = (
        f"{cluster.nodes} x {cluster.devices_per_node} devices: {cluster.device} ({cluster.name}); "
        f"{sum(a.tried for a in plan.answers)} configurations in {plan.seconds:.1f} s\n"
        "TTFT: of one prompt alone; req/s: with prompts waiting; within target: prompts under way, by Little's law"
    )
    sections = [head]
    for i, answer in enumerate(plan.answers):
        sections.append(format_answer(answer, rows))
        compared = [answer.best[0], *([answer.baseline] if answer.baseline else [])]
        sections += [split(compared), format_memory(compared)]
        sections.append(format_assumptions(assumed[i], answer.best[0]))
        if solved:
            sections.append(format_requirements(solved[i], answer))
    return "\n\n".join(sections)


def format_answer(answer: Answer, rows: int) -> str:
    """The best configurations for one length, with notes."""
    lines = [_row(p, answer.target_s, "=" if answer.is_tie(p) else "") for p in answer.best[:rows]]
    if answer.baseline is not None:
        lines.append(_row(answer.baseline, answer.target_s, "TP"))
    notes = []
    if answer.target_s is not None and min(p.ttft_s for p in answer.best) > answer.target_s:
        notes.append(f"No configuration meets the target; the best takes {answer.best[0].ttft_s:.2f} s. See --solve.")
    ties = len(answer.ties()) - 1
    if ties:
        notes.append(f"=: within {MODEL_ERROR:.0%} of the first in TTFT and rate, which the model does not tell apart")
    large = sorted((r for r in answer.refused if r.reason.startswith("needs")), key=lambda r: -r.shape.num_devices)
    notes += [f"does not fit: {r.shape} {r.split}: {r.reason}" for r in large[:_REFUSED]]
    more = len(answer.refused) - len(large[:_REFUSED])
    notes += [f"{more} other meshes cannot be used; --format=json has the reasons"] if more else []
    return "\n".join(
        [f"== {answer.num_tokens:,} tokens{_within(answer.target_s)} ==", table(_HEADS, lines, _TEXT), *notes]
    )


def _within(target_s: float | None) -> str:
    return "" if target_s is None else f", TTFT within {target_s:g} s"


def format_explanation(
    predictions: Sequence[Prediction], target_s: float | None, assumed: tuple[Assumption, ...]
) -> str:
    """Everything about one mesh and a target, if there is one; the best number of chunks comes first."""
    best = predictions[0]
    return "\n\n".join(
        [
            f"== {best.layout}, {best.num_tokens:,} tokens{_within(target_s)} ==\n"
            + table(_HEADS, [_row(p, target_s, "") for p in predictions], _TEXT),
            split(predictions[:1]),
            format_memory(predictions[:1]),
            format_assumptions(assumed, best),
        ]
    )


def format_memory(predictions: Sequence[Prediction]) -> str:
    """Where the memory of a device goes, a column for each prediction."""
    parts = {
        "weights": [p.memory.weights for p in predictions],
        "KV of the prompts under way": [p.memory.kv for p in predictions],
        "activations": [p.memory.activations for p in predictions],
        "reserve": [p.memory.reserve for p in predictions],
        "together": [p.memory.total for p in predictions],
        "of the device's": [p.memory.capacity for p in predictions],
    }
    rows = [(name, *(f"{size / 1e9:.2f}" for size in sizes)) for name, sizes in parts.items()]
    rows.append(
        ("prompts under way", *(str(max(p.memory.kv // max(p.memory.kv_of_prompt, 1), 1)) for p in predictions))
    )
    rows.append(("prompts for which there is room", *(str(p.memory.prompts) for p in predictions)))
    head = "memory of a device, GB"
    return table((head, *(str(p.layout) for p in predictions)), rows, {head})


def split(predictions: Sequence[Prediction]) -> str:
    """Where the time to first token goes, in milliseconds, a column for each prediction."""
    rows = []
    for part in PARTS:
        values = [p.parts[part] for p in predictions]
        if max(values) >= 5e-4:
            rows.append((part.replace("_", " "), *(f"{1e3 * v:.0f}" for v in values)))
    rows.append(("bubble", *(f"{1e3 * p.bubble_s:.0f}" for p in predictions)))
    rows.append(("together", *(f"{1e3 * p.ttft_s:.0f}" for p in predictions)))
    rows.append(("within it: padding", *(f"{1e3 * p.padding_s:.0f}" for p in predictions)))
    rows.append(("beside it: hidden ring", *(f"{1e3 * p.ring_hidden_s:.0f}" for p in predictions)))
    return table(
        ("ms, exchanges as far as exposed", *(str(p.layout) for p in predictions)),
        rows,
        {"ms, exchanges as far as exposed"},
    )


def format_assumptions(found: tuple[Assumption, ...], prediction: Prediction) -> str:
    """What a prediction hangs on, the most important first."""
    rows = [
        (
            a.name.replace("_", " "),
            _number(a.name, a.reading.value),
            a.reading.status,
            f"{_number(a.name, a.low)} to {_number(a.name, a.high)}",
            f"{a.ttft_low_s:.2f} to {a.ttft_high_s:.2f}",
        )
        for a in found[:_ASSUMPTIONS]
    ]
    heads = ("it hangs on", "value", "which is", "may be", f"TTFT then, for {prediction.ttft_s:.2f} s")
    weak = ", ".join(a.name.replace("_", " ") for a in hangs_on(found, prediction.ttft_s))
    note = f"\nassumed, and moving it by more than 2 %: {weak}" if weak else ""
    return table(heads, rows, set(heads)) + note


def format_requirements(found: Sequence[Requirement], answer: Answer) -> str:
    """What would have to be true for the target."""
    rows = []
    for r in found:
        values = ", ".join(f"{name.replace('_', ' ')} {_number(name, v)}" for name, v in r.values.items())
        rows.append(
            (
                r.change,
                "never" if r.factor is None else f"x {r.factor:.2f}",
                str(r.layout or "-"),
                f"{r.nodes} nodes" if r.nodes else values,
            )
        )
    heads = (f"to meet {answer.target_s:g} s, one change", "by", "with", "that is")
    return table(heads, rows, set(heads))


def format_calibration(found: Calibration) -> str:
    """How well a calibration meets what was measured."""
    points = [
        (
            e.operation,
            "-" if not e.at else f"{e.at:g}",
            _number(e.operation, e.value),
            "-" if e.left_out is None else f"{e.left_out:+.1%}",
        )
        for e in found.operations
    ]
    prefills = [
        (
            name,
            "fitted" if name in found.prefills.fitted else "test",
            f"{error:+.1%}",
            f"{found.prefills.left_out[name]:+.1%}" if name in found.prefills.left_out else "-",
        )
        for name, error in found.prefills.errors.items()
    ]
    heads = ("operation", "at", "measured", "from the other points")
    return "\n\n".join(
        [
            table(heads, points, {"operation"}),
            table(("prefill", "used as", "predicted over measured", "when left out"), prefills, {"prefill", "used as"}),
        ]
    )


def as_json(plan: Plan, assumed: Sequence[tuple[Assumption, ...]], solved: Sequence[tuple[Requirement, ...]]) -> Any:
    """Everything that was found, as values that `json.dumps` takes."""
    return {
        "cluster": {"name": plan.cluster.name, "device": plan.cluster.device, "nodes": plan.cluster.nodes},
        "seconds": plan.seconds,
        "answers": [
            {
                "tokens": answer.num_tokens,
                "target_s": answer.target_s,
                "best": [_prediction(p, answer) for p in answer.best],
                "baseline": answer.baseline and _prediction(answer.baseline, answer),
                "refused": [{"mesh": str(r.shape), "split": r.split, "reason": r.reason} for r in answer.refused],
                "assumptions": [dataclasses.asdict(a) for a in assumed[i]],
                "requirements": [
                    dataclasses.asdict(r) | {"layout": r.layout and str(r.layout)}
                    for r in (solved[i] if solved else ())
                ],
            }
            for i, answer in enumerate(plan.answers)
        ],
    }


def _prediction(p: Prediction, answer: Answer) -> dict[str, Any]:
    layout = p.layout
    values = dataclasses.asdict(p)
    del values["layout"]
    mesh = {"pp": layout.shape.pp, "ring": layout.shape.ring, "ulysses": layout.shape.ulysses}
    return {
        **mesh,
        "split": layout.split,
        "chunk_tokens": layout.chunk_tokens,
        "expert_weights": layout.expert_weights,
        **values,
        "limit": p.limit,
        "tie": answer.is_tie(p),
        "concurrency_within_target": None if answer.target_s is None else p.concurrency_within(answer.target_s),
    }


def _row(p: Prediction, target_s: float | None, mark: str) -> tuple[str, ...]:
    return (
        mark,
        str(p.layout),
        str(p.replicas),
        str(p.chunks),
        str(-(-p.num_tokens // p.chunks)),
        p.layout.expert_weights,
        p.ring_pass or "-",
        f"{p.ttft_s:.2f}",
        f"{p.requests_per_s:.2f}",
        "" if target_s is None else str(p.concurrency_within(target_s)),
        f"{p.memory.total / 1e9:.0f}",
        p.limit,
    )


def _number(name: str, value: float) -> str:
    """The value of a quantity with three digits, in its unit."""
    unit = "bytes_per_s" if name == "network" else QUANTITIES[name.split("/")[0]][1]
    if unit == "bytes_per_s":
        return f"{value / 1e9:.3g} GB/s"
    if unit == "seconds" and value:
        return f"{value * 1e6:.3g} us" if value < 1e-3 else f"{value * 1e3:.3g} ms"
    return f"{value:.3g}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: set[str]) -> str:
    """Columns, those in `left` aligned to the left."""
    lines = [tuple(heads), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if head in left else cell.rjust(width)
            for cell, width, head in zip(line, widths, heads, strict=True)
        ).rstrip()
        for line in lines
    )
