"""Prefills the project's own source files over a 2 x 2 x 2 mesh of virtual CPU devices, and checks the numbers.

    make prefill

It writes a small checkpoint with random weights when there is none, prefills one long prompt and two short ones in one
batch, saves their KV, and compares logits and KV with a plain forward on one device. The exit status is 1 when they
differ by more than rounding.
"""

from __future__ import annotations

import pathlib
import sys
import time
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from slope_jax.engine import Engine
from slope_jax.launch.compare import TOLERANCE, compare
from slope_jax.launch.flags import setup_runtime
from slope_jax.launch.make_checkpoint import PRESETS, make_checkpoint, project_files
from slope_jax.launch.outputs import folder_name
from slope_jax.launch.progress import TickProgress
from slope_jax.launch.tables import format_results
from slope_jax.mesh.axes import MeshShape
from slope_jax.model.tokenizer import Tokenizer
from slope_jax.request import Request, parse_batch

LONG_PROMPT_TOKENS = 8_000
CHUNK_TOKENS = 2_048


def demo_requests(tokenizer: Tokenizer) -> list[Request]:
    """One prompt of at least 8,000 tokens, as a coding agent would send it, and two short ones."""
    return [
        Request(request_id="sources", prompt=sources_prompt(tokenizer, LONG_PROMPT_TOKENS)),
        Request(request_id="question", prompt=_as_message("What does a halo of keys hold?")),
        Request(request_id="code", prompt="def ring_attention(q, k, v):\n    "),
    ]


def sources_prompt(tokenizer: Tokenizer, tokens: int) -> str:
    """A question about the project's source files, of which it takes as many lines as make at least `tokens` tokens."""
    lines: list[str] = []
    for path in (path for path in project_files() if path.suffix == ".py"):
        lines += [f"# file: {path.name}\n", *path.read_text(encoding="utf-8").splitlines(keepends=True)]
    for end in range(100, len(lines) + 25, 25):
        prompt = _as_message("".join(lines[:end]) + "\nWhich of these functions communicate between devices?")
        if len(tokenizer.encode(prompt)) >= tokens:
            return prompt
    raise ValueError(f"the project's files make a prompt of fewer than {tokens} tokens")


def _as_message(text: str) -> str:
    return f"<|start|>user<|message|>{text}<|end|><|start|>assistant"


def run(checkpoint: pathlib.Path, output_dir: pathlib.Path, mesh: MeshShape) -> int:
    """Runs the demonstration; returns the exit status."""
    if not checkpoint.exists():
        make_checkpoint(checkpoint, PRESETS["demo"])
        print(f"wrote a checkpoint with random weights to {checkpoint}")
    begin = time.perf_counter()
    engine = Engine.load(checkpoint, mesh=mesh, dtype="float32", chunk_tokens=CHUNK_TOKENS)
    print(f"loaded it on the mesh {mesh} (pp x ring x ulysses) in {time.perf_counter() - begin:.1f} s")
    if engine.tokenizer is None:
        raise ValueError(f"{checkpoint} has no tokenizer.json")
    begin = time.perf_counter()
    programs = engine.warmup()
    print(f"compiled {programs} programs in {time.perf_counter() - begin:.1f} s")
    requests = demo_requests(engine.tokenizer)
    with TickProgress() as progress:
        results = engine.prefill(requests, on_tick=progress)
    paths = [r.kv.save(output_dir / "kv" / folder_name(r.request_id), overwrite=True) for r in results]
    print()
    print(format_results(results, [str(path) for path in paths], engine.tokenizer))
    print()
    print("largest difference from a plain forward on one device, in float32:")
    parsed = parse_batch(requests, limits=engine.limits, encode=engine.tokenizer.encode)
    worst = 0.0
    for request, result in zip(parsed, results, strict=True):
        difference = compare(checkpoint, request.token_ids, result)
        print(f"  {request.request_id}: {difference}", flush=True)
        worst = float(np.max([worst, difference.logits, difference.kv]))
    if not worst <= TOLERANCE:
        print(f"FAILED: the difference {worst:.2e} is greater than {TOLERANCE:.0e}, which is more than rounding")
        return 1
    print(f"OK: all are within {TOLERANCE:.0e}")
    return 0


def main(argv: Sequence[str]) -> None:
    """Runs the program."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    mesh = setup_runtime()
    sys.exit(run(pathlib.Path(flags.FLAGS.checkpoint), pathlib.Path(flags.FLAGS.output_dir), mesh))


def define_flags() -> None:
    """Defines the flags of the program, and sets the defaults of those of the mesh."""
    flags.DEFINE_string("checkpoint", "runs/demo-checkpoint", "Folder of the checkpoint; made when it does not exist.")
    flags.DEFINE_string("output_dir", "runs/demo", "Folder to save the KV in.")
    for name, value in (("pp", 2), ("ring", 2), ("ulysses", 2), ("cpu_devices", 8)):
        flags.FLAGS.set_default(name, value)


if __name__ == "__main__":
    define_flags()
    app.run(main)
