"""Prints how far float32 results are from the float64 oracle, over mesh shapes: `python -m tests.slope_jax.noise`."""

from __future__ import annotations

import pathlib
import tempfile

import jax

from tests.oracle import checkpoints
from tests.slope_jax.engines import ALL_SHAPES, engine, errors

LENGTHS = (1, 9, 40, 150, 600)


def main() -> None:
    """Prints a line per mesh shape and the largest of all."""
    jax.config.update("jax_num_cpu_devices", 8)
    directory = checkpoints.write_checkpoint(checkpoints.TOY8, pathlib.Path(tempfile.mkdtemp()))
    prompts = [checkpoints.random_prompt(checkpoints.TOY8, n, seed=n) for n in LENGTHS]
    largest = (0.0, 0.0)
    for shape in ALL_SHAPES:
        results = engine(directory, shape).prefill(prompts)
        found = [errors(directory, p, r) for p, r in zip(prompts, results, strict=True)]
        worst = max(f[0] for f in found), max(f[1] for f in found)
        largest = max(largest[0], worst[0]), max(largest[1], worst[1])
        print(f"{shape}  logits {worst[0]:.1e}  KV {worst[1]:.1e}", flush=True)
    print(f"all    logits {largest[0]:.1e}  KV {largest[1]:.1e}")


if __name__ == "__main__":
    main()
