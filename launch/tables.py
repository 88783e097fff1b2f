"""The table of results that the programs print."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from slope_jax.model.tokenizer import Tokenizer
from slope_jax.result import PrefillResult
from slope_jax.sampling import log_probabilities

_HEADINGS = ("prompt", "tokens", "TTFT s", "tokens/s", "token", "text", "probability", "KV bytes", "KV")
_RIGHT = {"tokens", "TTFT s", "tokens/s", "token", "probability", "KV bytes"}


def format_results(
    results: Sequence[PrefillResult], kv_paths: Sequence[str], tokenizer: Tokenizer | None, *, width: int = 24
) -> str:
    """A table with one line per result.

    Args:
      results: the results.
      kv_paths: where the KV of each was saved, or why it was not.
      tokenizer: gives the text of first tokens, when there is one.
      width: the longest prompt name that is shown whole.
    """
    rows = [_HEADINGS]
    for result, kv_path in zip(results, kv_paths, strict=True):
        logprob = float(log_probabilities(result.logits)[result.token_id])
        rows.append(
            (
                _shorten(result.request_id, width),
                f"{result.num_tokens}",
                f"{result.ttft_s:.3f}",
                f"{result.num_tokens / result.ttft_s:.0f}",
                f"{result.token_id}",
                repr(tokenizer.decode([result.token_id])) if tokenizer else "-",
                f"{math.exp(logprob):.4f}",
                f"{result.kv.nbytes}",
                kv_path,
            )
        )
    return "\n".join(_align(rows))


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(_columns(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for heading, cell, width in zip(rows[0], row, widths, strict=True):
            fill = " " * (width - _columns(cell))
            cells.append(fill + cell if heading in _RIGHT else cell + fill)
        lines.append("  ".join(cells).rstrip())
    return lines


def _columns(text: str) -> int:
    """The width of a text on a terminal."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def _shorten(text: str, width: int) -> str:
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return printable if len(printable) <= width else printable[: width - 3] + "..."
