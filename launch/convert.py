"""Writes an Orbax checkpoint from safetensors: `python -m slope_jax.launch.convert --checkpoint=DIR --output=DIR`.

`Engine.load` takes the result in place of the safetensors folder, on any mesh. Conversion runs in one process, needs no
accelerator, and holds one part of the result (256 MiB) in memory at a time.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence

import jax
from absl import app, flags, logging

from slope_jax.model.checkpoint import orbax
from slope_jax.model.checkpoint.safetensors import Checkpoint

_CHECKPOINT = flags.DEFINE_string("checkpoint", None, "Folder with config.json and safetensors files.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write; must not exist or be empty.", required=True)
_EXPERT_WEIGHTS = flags.DEFINE_enum(
    "expert_weights", None, ["bfloat16", "mxfp4"], "Form of the expert weights; as in the checkpoint by default."
)
_DTYPE = flags.DEFINE_enum(
    "dtype",
    "float32",
    ["bfloat16", "float32"],
    "Widest type that the result can be loaded with. float32 keeps every value as it is and is no larger for tensors "
    "that are bfloat16 already; bfloat16 rounds the float32 tensors that a bfloat16 model would round.",
)


def main(argv: Sequence[str]) -> int:
    """Converts and says what was written; returns the exit status."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    # Otherwise JAX would look for accelerators and take their memory, for nothing.
    jax.config.update("jax_platforms", "cpu")
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax logs every array
    try:
        source = Checkpoint.open(_CHECKPOINT.value)
        orbax.convert(source, _OUTPUT.value, dtype=_DTYPE.value, experts=_EXPERT_WEIGHTS.value)
    except (ValueError, OSError) as error:
        print(f"convert: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in pathlib.Path(_OUTPUT.value).rglob("*") if path.is_file())
    print(f"wrote {_OUTPUT.value}: {size / 2**20:,.1f} MiB")
    return 0


if __name__ == "__main__":
    app.run(main)
