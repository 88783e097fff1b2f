"""Loads a checkpoint in a process of its own, for test_load_processes.py, and prints what that took as JSON.

python load_job.py DIRECTORY PPxRINGxULYSSES DTYPE PACKED SPLIT [ADDRESS NUM_PROCESSES PROCESS_ID]
"""

from __future__ import annotations

import hashlib
import json
import math
import pathlib
import sys

import jax
import numpy as np

from slope_jax.mesh.axes import MeshShape, make_mesh
from slope_jax.model.checkpoint import orbax
from slope_jax.model.checkpoint.safetensors import Checkpoint
from slope_jax.model.checkpoint.weights import load_model
from slope_jax.model.config import load_config
from slope_jax.model.stage_plan import plan_stages


def main() -> None:
    """Prints one line: bytes read, peak memory, size of the arrays, digests of the shards by position in the mesh."""
    directory, shape_text, dtype, packed, split, *job = sys.argv[1:]
    shape = MeshShape(*map(int, shape_text.split("x")))
    num_processes = int(job[1]) if job else 1
    jax.config.update("jax_num_cpu_devices", shape.num_devices // num_processes)
    if job:
        jax.distributed.initialize(job[0], num_processes, int(job[2]))
    config = load_config(directory)
    form = orbax.ConvertedCheckpoint if orbax.is_converted(directory) else Checkpoint
    source = form.open(directory)
    mesh = make_mesh(shape)
    before = peak_memory()
    plan = plan_stages(config.layer_types, shape.pp)
    _, state = load_model(source, config, plan, mesh, dtype, packed == "packed", split == "split")
    jax.block_until_ready(state)
    after = peak_memory()
    positions = {device: position for position, device in enumerate(mesh.devices.flat)}
    digests: dict[int, str] = {}
    buffers: dict[int, int] = {}
    for array in jax.tree.leaves(state):
        for shard in array.addressable_shards:
            buffers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
            if math.prod(array.shape) < 1_000_000:
                position = positions[shard.device]
                digest = hashlib.sha256(digests.get(position, "").encode() + np.asarray(shard.data).tobytes())
                digests[position] = digest.hexdigest()
    result = {"bytes_read": source.bytes_read, "before": before, "after": after, "arrays": sum(buffers.values())}
    print(json.dumps(result | {"digests": digests}))


def peak_memory() -> int:
    """Most bytes of memory that this program has held; unlike getrusage, without those of the program before exec."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


if __name__ == "__main__":
    main()
