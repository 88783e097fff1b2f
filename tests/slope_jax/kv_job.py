"""One of two processes that do not ask for the same KV: `kv_job CHECKPOINT PORT PROCESS CASE`."""

from __future__ import annotations

import sys

import jax

from slope_jax import Engine, MeshShape
from slope_jax.mesh.processes import distributed


def main() -> int:
    """Prefills the same prompts as the other process and then differs from it as the case says."""
    directory, port, process, case = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    jax.config.update("jax_num_cpu_devices", 1)
    distributed.initialize(f"127.0.0.1:{port}", 2, process)
    engine = Engine.load(directory, mesh=MeshShape(1, 2, 1), dtype="float32", chunk_tokens=64)
    if case == "warmup":
        if process == 0:
            engine.warmup()
        return 0
    first, second = engine.prefill([[1, 2, 3], [4, 5, 6, 7]])
    if case == "layers":
        first.kv.layer(1 if process == 0 else 3)
    if case == "requests":
        (first if process == 0 else second).kv.layer(1)
    if case == "one" and process == 0:
        first.kv.layer(1)
    return 0


if __name__ == "__main__":
    sys.exit(distributed.run_program(main))
