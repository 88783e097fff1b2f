"""The answers of the planner as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slope_jax.planner.evaluate import Prediction
from slope_jax.planner.operations import PARTS
from slope_jax.planner.search import MODEL_ERROR, Answer, Plan

_HEADS = ("", "pp x ring x u", "replicas", "chunks", "of tokens", "experts", "ring", "TTFT s", "req/s", "within target",
          "GB", "most time goes to")  # fmt: skip
_TEXT = {"", "pp x ring x u", "experts", "ring", "most time goes to"}  # columns that are aligned to the left


def format_plan(plan: Plan, rows: int = 5) -> str:
    """All answers, each with a table of the best configurations and the split of the first one's time."""
    cluster = plan.cluster
    head = (
        f"{cluster.nodes} x {cluster.devices_per_node} devices: {cluster.device}, {cluster.name}; "
        f"{sum(a.tried for a in plan.answers)} configurations in {plan.seconds:.1f} s"
    )
    return "\n\n".join([head, *(format_answer(answer, rows) for answer in plan.answers)])


def format_answer(answer: Answer, rows: int) -> str:
    """One answer."""
    target = f", TTFT within {answer.target_s:g} s" if answer.target_s is not None else ""
    title = f"== {answer.num_tokens:,} tokens{target} =="
    shown = list(answer.best[:rows])
    lines = [_row(p, answer, "=" if answer.is_tie(p) else "") for p in shown]
    if answer.baseline is not None:
        lines.append(_row(answer.baseline, answer, "TP"))
    notes = []
    if answer.target_s is not None and answer.best[0].ttft_s > answer.target_s:
        notes.append(f"No configuration meets the target; the best takes {answer.best[0].ttft_s:.2f} s. See --solve.")
    ties = len(answer.ties()) - 1
    if ties:
        notes.append(
            f"{ties} other{'s are' if ties > 1 else ' is'} within {MODEL_ERROR:.0%} of the first (=), "
            "which the model does not tell apart."
        )
    parts = [title, table(_HEADS, lines, _TEXT), *notes, "", split(answer.best[:1], answer.baseline)]
    return "\n".join(parts)


def split(predictions: Sequence[Prediction], baseline: Prediction | None) -> str:
    """Where the time to first token goes, in milliseconds, a column for each."""
    columns = [*predictions, *([baseline] if baseline else [])]
    rows = []
    for part in PARTS:
        values = [p.parts[part] for p in columns]
        if max(values) >= 5e-4:
            rows.append((part.replace("_", " "), *(f"{1e3 * v:.0f}" for v in values)))
    rows.append(("bubble", *(f"{1e3 * p.bubble_s:.0f}" for p in columns)))
    rows.append(("together", *(f"{1e3 * p.ttft_s:.0f}" for p in columns)))
    rows.append(("within it: padding", *(f"{1e3 * p.padding_s:.0f}" for p in columns)))
    rows.append(("beside it: ring, hidden", *(f"{1e3 * p.ring_hidden_s:.0f}" for p in columns)))
    return table(("ms", *(str(p.layout) for p in columns)), rows, {"ms"})


def _row(p: Prediction, answer: Answer, mark: str) -> tuple[str, ...]:
    within = "" if answer.target_s is None else str(p.concurrency_within(answer.target_s))
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
        within,
        f"{p.memory.total / 1e9:.0f}",
        p.limit,
    )


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
