"""Runs the benchmark: `python -m slope_jax.launch.bench`."""

from absl import app

from slope_jax.launch.bench.program import define_flags, main

if __name__ == "__main__":
    define_flags()
    app.run(main)
