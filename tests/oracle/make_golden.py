"""Writes golden files: `python -m tests.oracle.make_golden [name ...]`, with the packages of requirements-oracle.txt.

Takes a few minutes. For each file it prints how far transformers in float32 and in bfloat16 are from the float64
forward.

The prompts are random ones whose routing decisions are not close. In bfloat16 a near tie between two experts is decided
by rounding, and one token sent to another expert changes the logits by more than all other rounding together; an error
measured on such a prompt says nothing about the arithmetic.
"""

from __future__ import annotations

import importlib.metadata
import pathlib
import sys
import tempfile
from collections.abc import Sequence

import numpy as np

from tests.oracle import checkpoints, golden, numpy_forward, transformers_reference

CANDIDATES = 500
CANDIDATES_LONG = 100  # of prompts beyond LONG tokens: with so many routing decisions more candidates gain little
LONG = 64


def choose_prompt(model: checkpoints.TinyModel, directory: pathlib.Path, length: int) -> list[int]:
    """The random prompt of a length, out of some candidates, whose routing is the farthest from a tie."""
    count = CANDIDATES_LONG if length > LONG else CANDIDATES
    candidates = [checkpoints.random_prompt(model, length, seed) for seed in range(count)]
    return max(candidates, key=lambda prompt: routing_margin(model, directory, prompt))


def routing_margin(model: checkpoints.TinyModel, directory: pathlib.Path, prompt: list[int]) -> float:
    """The smallest gap in any layer between the router logits of the last expert chosen and the first one not chosen.

    The gaps of tokens before the last one count eightfold: they reach the logits through attention only.
    """
    router_logits: list[numpy_forward.Array] = []
    numpy_forward.forward(directory, prompt, router_logits=router_logits)
    ordered = np.sort(np.stack(router_logits), axis=-1)
    gaps = ordered[..., -model.experts_per_token] - ordered[..., -model.experts_per_token - 1]
    gaps[:, :-1] *= 8
    return float(gaps.min())


def make(case: golden.Case, directory: pathlib.Path) -> golden.Golden:
    """Runs transformers in float32 and in bfloat16 on every prompt of a case."""
    checkpoints.write_checkpoint(case.model, directory, experts="float32", dtype="float32")
    prompts = [choose_prompt(case.model, directory, length) for length in case.lengths]
    model = transformers_reference.load(directory)
    results = [transformers_reference.prefill(model, prompt) for prompt in prompts]
    model_bf16 = transformers_reference.load(directory, "bfloat16")
    return golden.Golden(
        model=case.model,
        prompts=prompts,
        logits=np.stack([logits for logits, _ in results]),
        logits_bf16=np.stack([transformers_reference.prefill(model_bf16, prompt)[0] for prompt in prompts]),
        kv={
            len(prompt): [(k, v) for _, k, v in kv]
            for prompt, (_, kv) in zip(prompts, results, strict=True)
            if len(prompt) in case.kv_lengths
        },
        versions={name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
    )


def main(names: Sequence[str]) -> None:
    """Makes the golden files of some cases."""
    for name in names:
        case = golden.CASES[name]
        with tempfile.TemporaryDirectory() as directory:
            made = make(case, pathlib.Path(directory))
            exact = [numpy_forward.forward(directory, prompt) for prompt in made.prompts]
        path = golden.save(name, made)
        logits = np.stack([logits for logits, _ in exact])
        kv_noise = max(
            (
                np.abs(np.stack(pair) - np.stack(exact_pair)).max()
                for length, layers in made.kv.items()
                for pair, exact_pair in zip(layers, exact[case.lengths.index(length)][1], strict=True)
            ),
            default=0.0,
        )
        bf16 = " ".join(f"{error:.3f}" for error in np.abs(made.logits_bf16 - made.logits).max(axis=1))
        print(
            f"{name}: {path.stat().st_size} bytes, largest |logit| {np.abs(logits).max():.2f}; transformers float32 "
            f"differs from float64 by {np.abs(made.logits - logits).max():.1e} (logits), {kv_noise:.1e} (KV); "
            f"bfloat16 logits of each prompt by {bf16}"
        )


if __name__ == "__main__":
    main(sys.argv[1:] or list(golden.CASES))
