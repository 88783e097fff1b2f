"""One process of a small job, for test_distributed.py: `python job.py ADDRESS NUM_PROCESSES PROCESS_ID CASE`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slope_jax.mesh.processes import distributed
from slope_jax.mesh.processes.heartbeat import Limits

COLLECTIVES_BEFORE_THE_CASE = 40


def main() -> int:
    """Starts the job, then runs collectives without end, or what the case says."""
    address, num_processes, process_id, case = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    jax.config.update("jax_num_cpu_devices", 2)
    startup_timeout_s = 2.0 if case == "alone" else 60.0
    distributed.initialize(
        address, num_processes, process_id, limits=Limits(silence_s=6.0), startup_timeout_s=startup_timeout_s
    )
    victim = case.endswith(str(process_id))
    if case == "disagree":
        distributed.agree("flags", {"chunk_tokens": "4096" if process_id else "2048", "dtype": "bfloat16"}, 30.0)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    rows = np.arange(2 * num_processes * 3, dtype=np.float32).reshape(-1, 3)
    x = jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
    def rotate(x: jax.Array) -> jax.Array:
        return jax.lax.ppermute(x, "x", [(i, (i + 1) % mesh.size) for i in range(mesh.size)])

    if case.startswith("end"):
        return end(mesh, x, rotate(x), rows, process_id)
    step = 0
    while True:
        x = rotate(x).block_until_ready()
        step += 1
        if step == COLLECTIVES_BEFORE_THE_CASE and victim:
            print(f"case at {time.time()}", flush=True)
            if case.startswith("raise"):
                raise KeyError("the case of the test")
            if case.startswith("abort"):
                threading.Thread(target=distributed.abort, args=("the watchdog of the test",)).start()
                continue
            if case.startswith("hold"):
                ctypes.PyDLL(None).sleep(3600)  # a call into C that keeps the interpreter from all other threads
            os.kill(os.getpid(), signal.SIGSTOP if case.startswith("stop") else signal.SIGKILL)


def end(mesh: Mesh, x: jax.Array, rotated: jax.Array, rows: np.ndarray, process_id: int) -> int:
    """Compares what the processes see of arrays that lie on both, and ends in peace."""
    distributed.agree("flags", {"dtype": "bfloat16", "long": "a" * 1000})
    assert distributed.broadcast("choice", f"from {process_id}") == "from 0"
    replicated = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, PartitionSpec()))(x)
    for array, expected in ((x, rows), (rotated, np.roll(rows, 1, axis=0)), (replicated, rows + 1)):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[shard.index])
    if process_id == 1:
        time.sleep(1.0)
    print("done", flush=True)
    return 4 * process_id if sys.argv[4] == "end_4" else 0


if __name__ == "__main__":
    sys.exit(distributed.run_program(main))
