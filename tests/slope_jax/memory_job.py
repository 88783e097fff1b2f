"""Prefills one prompt and prints the peak memory of the process in bytes: `memory_job DIR TOKENS`."""

from __future__ import annotations

import resource
import sys

import numpy as np

from slope_jax import Engine


def main() -> None:
    """Runs on one device in bfloat16, as loaded by default."""
    directory, tokens = sys.argv[1], int(sys.argv[2])
    engine = Engine.load(directory)
    ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, tokens)
    result = engine.prefill([ids])[0]
    assert result.num_tokens == tokens
    assert np.isfinite(result.logits).all()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main()
