"""Attention needs memory in proportion to the tokens, not to their square."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from slope_jax.launch.make_checkpoint import PRESETS, make_checkpoint

ROOT = pathlib.Path(__file__).parents[2]


def test_32k_tokens_stay_under_4_gib(tmp_path: pathlib.Path) -> None:
    """The bench-size model; one layer's scores alone would take 64 GiB if they were kept."""
    make_checkpoint(tmp_path / "mini", PRESETS["mini"])
    command = [sys.executable, "-m", "tests.slope_jax.memory_job", str(tmp_path / "mini"), "32768"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, check=True)
    assert int(done.stdout) < 4 << 30
