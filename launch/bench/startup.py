"""How long a start takes, without and with the compiled programs of an earlier one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

MODULE = "slope_jax.launch.bench"


def startup_rows(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Starts the benchmark twice with an empty compilation cache; a row for each engine that it loads.

    Args:
      arguments: the flags of the benchmark.

    Raises:
      ValueError: the program failed; the message is what it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        only_load = ["--nostartup", "--noprefill", "--nooperations", "--plot=", f"--compilation_cache_dir={folder}"]
        first, second = (_engine_rows([*arguments, *only_load]) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        times = {f"{name}_{key}": row[key] for name, row in (("first", a), ("second", b)) for key in _TIMES}
        shared = {key: value for key, value in a.items() if key not in (*_TIMES, "kind", "memory")}
        yield (
            {"kind": "startup"}
            | shared
            | times
            | {
                "start_ratio": sum(a[key] for key in _TIMES) / sum(b[key] for key in _TIMES),
                "warmup_ratio": a["warmup_s"] / b["warmup_s"],
            }
        )


_TIMES = ("load_s", "warmup_s")


def _engine_rows(arguments: Sequence[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", MODULE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr[-2000:]}")
    return [row for row in map(json.loads, done.stdout.splitlines()) if row["kind"] == "engine"]
