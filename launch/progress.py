"""The progress bar of the programs."""

from __future__ import annotations

import sys
from typing import Any

import jax
import tqdm


class TickProgress:
    """A progress bar over ticks, on process 0 when standard error is a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm.tqdm[Any] | None = None

    def __enter__(self) -> TickProgress:
        if jax.process_index() == 0 and sys.stderr.isatty():
            self._bar = tqdm.tqdm(desc="prefill", unit="tick")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        """Shows that `done` of `total` ticks are done."""
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
