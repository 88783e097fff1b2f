"""What processes read and hold while they load (CASES L05)."""

from __future__ import annotations

import json
import math
import pathlib
import socket
import subprocess
import sys
from typing import Any

import pytest

from slope_jax.model.checkpoint import orbax
from slope_jax.model.checkpoint.safetensors import Checkpoint, expected_tensors
from slope_jax.model.config import load_config
from slope_jax.model.stage_plan import plan_stages
from tests.oracle import checkpoints
from tests.oracle.checkpoints import TOY

JOB = pathlib.Path(__file__).with_name("load_job.py")


def run_jobs(*jobs: tuple[str, ...]) -> list[dict[str, Any]]:
    """The results of `load_job.py` with each of the argument lists, run at the same time."""
    processes = [subprocess.Popen([sys.executable, str(JOB), *job], stdout=subprocess.PIPE, text=True) for job in jobs]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(jobs)
    return [json.loads(output) for output in outputs]


def run_two_and_one(*what: str) -> list[dict[str, Any]]:
    """The results of two processes that share a mesh, which together hold what the third, alone, holds."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    first, second, alone = run_jobs((*what, address, "2", "0"), (*what, address, "2", "1"), what)
    assert first["digests"] | second["digests"] == alone["digests"]
    assert first["digests"].keys().isdisjoint(second["digests"])
    return [first, second, alone]


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_two_processes_read_their_own_half(toy_dir: pathlib.Path, tmp_path: pathlib.Path, form: str) -> None:
    directory = toy_dir
    if form == "orbax":
        directory = tmp_path / "converted"
        orbax.convert(Checkpoint.open(toy_dir), directory)
    first, second, alone = run_two_and_one(str(directory), "2x2x2", "bfloat16", "unpacked", "whole")

    if form == "orbax":  # the vocabulary is small enough here to be a single chunk
        assert max(first["bytes_read"], second["bytes_read"]) < 0.6 * alone["bytes_read"]
        return
    tensors = checkpoints.model_tensors(TOY)
    plan = plan_stages(TOY.layer_types, 2)
    vocab_rows = 4 * math.ceil(TOY.vocab / 8)  # four of eight devices
    for stage, result in enumerate((first, second)):
        wanted = tensors["model.norm.weight"].nbytes + tensors["model.embed_tokens.weight"].nbytes // 2
        wanted += (vocab_rows if stage == 0 else TOY.vocab - vocab_rows) * TOY.hidden * 2
        for layer in plan.layers[stage]:
            wanted += sum(t.nbytes for name, t in tensors.items() if name.startswith(f"model.layers.{layer}."))
        assert result["bytes_read"] == wanted


def test_two_processes_read_their_own_experts(toy_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    first, second, _ = run_two_and_one(str(toy_dir), "1x1x2", "bfloat16", "packed", "split")
    tensors = checkpoints.model_tensors(TOY)
    vocab_rows = math.ceil(TOY.vocab / 2)
    for rank, result in enumerate((first, second)):
        wanted = tensors["model.norm.weight"].nbytes + tensors["model.embed_tokens.weight"].nbytes // 2
        wanted += (vocab_rows if rank == 0 else TOY.vocab - vocab_rows) * TOY.hidden * 2
        for name, tensor in tensors.items():
            if name.startswith("model.layers."):
                wanted += tensor.nbytes // (2 if ".experts." in name else 1)
        assert result["bytes_read"] == wanted

    orbax.convert(Checkpoint.open(toy_dir), tmp_path / "converted")
    first, second, alone = run_two_and_one(str(tmp_path / "converted"), "1x1x2", "bfloat16", "packed", "split")
    kernels = sum(t.nbytes for name, t in tensors.items() if name.endswith(("_blocks", "_scales")))
    assert max(first["bytes_read"], second["bytes_read"]) <= alone["bytes_read"] - kernels // 2


def write_sparse(directory: pathlib.Path, experts: int) -> None:
    """A checkpoint of one layer with experts of the published size and a small vocabulary, all bytes zero.

    The file has a hole for its data, so it takes no space and reads fast.
    """
    model = checkpoints.TinyModel(
        layer_types=(checkpoints.FULL,), hidden=2880, intermediate=2880, num_experts=experts, vocab=512
    )
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(checkpoints.config_dict(model)))
    header, offset = {}, 0
    for name, (shape, dtypes) in expected_tensors(load_config(directory), True).items():
        stop = offset + math.prod(shape) * dtypes[0].itemsize
        kind = {"bfloat16": "BF16", "uint8": "U8"}[str(dtypes[0])]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)


@pytest.mark.parametrize(("experts", "packed"), [(96, "packed"), (20, "unpacked")])
def test_the_host_holds_little_beside_the_arrays(tmp_path: pathlib.Path, experts: int, packed: str) -> None:
    """The largest tensor is 0.8 GB (packed) or becomes 0.66 GB (unpacked), so to hold one would be seen here.

    The two devices of a CPU process share the arrays, which are counted once.
    """
    write_sparse(tmp_path / "sparse", experts)
    (result,) = run_jobs((str(tmp_path / "sparse"), "1x2x1", "bfloat16", packed, "whole"))
    assert result["arrays"] > 0.9e9
    assert result["after"] - result["arrays"] < 1 << 30, "with Python, JAX and its programs"
    assert result["after"] - result["arrays"] - result["before"] < 400 << 20
