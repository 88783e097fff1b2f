"""The prefill program in two real processes: equal output, and an end with a reason when one is lost or differs."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from slope_jax import MeshShape, load_kv
from tests.launch.conftest import free_port
from tests.oracle import checkpoints
from tests.oracle.checkpoints import WriteCheckpoint
from tests.slope_jax.engines import TOLERANCE, engine, oracle

ROOT = pathlib.Path(__file__).parents[2]
MODEL = checkpoints.TOY
LENGTHS = (1, 40, 150, 7)
TIME_LIMIT_S = 60  # within which the others end when a process is lost


def write_prompts(folder: pathlib.Path, lengths: tuple[int, ...] = LENGTHS, repeats: int = 1) -> pathlib.Path:
    path = folder / "prompts.jsonl"
    prompts = [checkpoints.random_prompt(MODEL, n, seed=n) for n in lengths] * repeats
    lines = [json.dumps({"id": f"p{i}", "prompt_token_ids": p}) for i, p in enumerate(prompts)]
    path.write_text("\n".join(lines))
    return path


def flags(directory: pathlib.Path, prompts: pathlib.Path, output: pathlib.Path, *more: str) -> list[str]:
    return [
        f"--checkpoint={directory}",
        f"--prompts={prompts}",
        f"--output_dir={output}",
        "--pp=2",
        "--ring=2",
        "--ulysses=2",
        "--dtype=float32",
        "--chunk_tokens=64",
        *more,
    ]


def start_pair(
    commands: list[list[str]], folder: pathlib.Path, working: list[pathlib.Path]
) -> list[subprocess.Popen[bytes]]:
    """Two processes with four devices each; their output goes to files, so that none waits for a reader."""
    port = free_port()
    started = []
    for i, command in enumerate(commands):
        many = [f"--coordinator_address=127.0.0.1:{port}", "--num_processes=2", f"--process_id={i}", "--cpu_devices=4"]
        module = [sys.executable, "-m", "slope_jax.launch.prefill"]
        with open(folder / f"log{i}", "wb") as log:
            started.append(subprocess.Popen([*module, *command, *many], stdout=log, stderr=log, cwd=working[i]))
    return started


def wait_for(condition: str, path: pathlib.Path, process: subprocess.Popen[bytes], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while condition not in path.read_text(errors="replace"):
        assert process.poll() is None, path.read_text(errors="replace")
        assert time.monotonic() < deadline, path.read_text(errors="replace")
        time.sleep(0.2)


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(10)


@pytest.mark.parametrize("ring_pass", ["auto", "q"])
def test_two_processes_give_the_output_of_one(
    checkpoint: WriteCheckpoint, tmp_path: pathlib.Path, ring_pass: str
) -> None:
    """Case J11: logits and KV that lie on both processes' devices, whole and in the right order."""
    directory, output = checkpoint(MODEL), tmp_path / "out"
    script = [str(ROOT / "launch" / "local.sh"), "-n", "2", "-d", "4", "--"]
    command = [*script, *flags(directory, write_prompts(tmp_path), output, f"--ring_pass={ring_pass}")]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    prompts = [checkpoints.random_prompt(MODEL, n, seed=n) for n in LENGTHS]
    blocks = {"page_tokens": 64, "block_q": None, "block_kv": 512}
    alone = engine(directory, MeshShape(2, 2, 2), ring_pass=ring_pass, **blocks).prefill(prompts)
    assert [r["id"] for r in records] == ["p0", "p1", "p2", "p3"]
    for record, prompt, result in zip(records, prompts, alone, strict=True):
        assert record["token_id"] == result.token_id
        assert record["num_tokens"] == len(prompt)
        logits = oracle(directory, tuple(prompt))[0]
        top = np.argsort(-logits)[:5]
        logprobs = logits - np.log(np.exp(logits).sum())
        assert [t["token_id"] for t in record["top_logprobs"]] == top.tolist()
        np.testing.assert_allclose([t["logprob"] for t in record["top_logprobs"]], logprobs[top], atol=TOLERANCE)
        saved = load_kv(output / record["kv"], token_ids=prompt)
        for layer in range(MODEL.num_layers):
            start, k, v = saved.layer(layer)
            mine = result.kv.layer(layer)
            assert start == mine[0]
            np.testing.assert_array_equal(k, mine[1])
            np.testing.assert_array_equal(v, mine[2])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_by_name(
    checkpoint: WriteCheckpoint, tmp_path: pathlib.Path, victim: int
) -> None:
    """Case J09, in the middle of a long batch."""
    prompts = write_prompts(tmp_path, lengths=(1500,), repeats=400)
    command = flags(checkpoint(MODEL), prompts, tmp_path / "out", "--verbosity=0")
    processes = start_pair([command, command], tmp_path, [ROOT, ROOT])
    try:
        wait_for("compiled", tmp_path / "log0", processes[0])
        time.sleep(2)
        assert all(p.poll() is None for p in processes)
        processes[victim].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        status = processes[1 - victim].wait(TIME_LIMIT_S)
        assert status != 0
        assert time.monotonic() - begin < TIME_LIMIT_S
        assert f"process {victim}" in (tmp_path / f"log{1 - victim}").read_text(errors="replace")
    finally:
        for process in processes:
            end(process)


@pytest.mark.parametrize(
    ("difference", "message"), [("flag", "chunk_tokens"), ("batch", "the content of the file"), ("checkpoint", "model")]
)
def test_processes_that_disagree_end_with_the_difference(
    checkpoint: WriteCheckpoint, tmp_path: pathlib.Path, difference: str, message: str
) -> None:
    """Each process has a folder of its own, as on hosts whose files are not shared."""
    chunk = {"flag": 32}.get(difference, 64)
    lengths = {"batch": (1, 41, 150, 7)}.get(difference, LENGTHS)
    model = {"checkpoint": dataclasses.replace(MODEL, seed=77)}.get(difference, MODEL)
    folders = []
    for i, (its_model, its_lengths) in enumerate([(MODEL, LENGTHS), (model, lengths)]):
        folders.append(tmp_path / f"host{i}")
        folders[i].mkdir()
        (folders[i] / "checkpoint").symlink_to(checkpoint(its_model))
        write_prompts(folders[i], its_lengths)
    where = pathlib.Path()
    commands = [
        flags(where / "checkpoint", where / "prompts.jsonl", where / "out", "--nowarmup", f"--chunk_tokens={tokens}")
        for tokens in (64, chunk)
    ]
    processes = start_pair(commands, tmp_path, folders)
    try:
        for i, process in enumerate(processes):
            assert process.wait(180) != 0
            assert message in (tmp_path / f"log{i}").read_text(errors="replace")
    finally:
        for process in processes:
            end(process)
