"""Processes that do not ask for the same KV, or not all of them, end with a message: none hangs or mixes layers."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

from tests.launch.conftest import free_port

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("layers", "layer: '1 of request 0' on process 0; '3 of request 0' on process 1"),
        ("requests", "'1 of request 0' on process 0; '1 of request 1' on process 1"),
        ("one", "different points of the program"),
        ("warmup", "different points of the program"),
    ],
)
def test_a_difference_ends_both(toy_dir: pathlib.Path, case: str, message: str) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.slope_jax.kv_job", str(toy_dir), str(port)]
    pair = [subprocess.Popen([*command, str(i), case], stderr=subprocess.PIPE, text=True, cwd=ROOT) for i in (0, 1)]
    try:
        for process in pair:
            _, text = process.communicate(timeout=120)
            assert process.returncode != 0, text
            assert message in text
    finally:
        for process in pair:
            process.kill()
            process.wait(10)
