"""Random weights that keep activations at a size of about 1 and logits at about 5.

`RandomSource` gives a model of any sizes without a file: its tensors are drawn where they are read.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from slope_jax.model.checkpoint.safetensors import expected_tensors, slice_bounds
from slope_jax.model.config import GptOssConfig

_BFLOAT16, _UINT8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint8)
_DRAWN_AT_ONCE = 1 << 20  # values of one random stream
_FP4_RMS = math.sqrt(np.mean(np.square([0, 0.5, 1, 1.5, 2, 3, 4, 6])))  # of a uniformly random code


def draw_rows(random: np.random.Generator, name: str, shape: Sequence[int], rows: int) -> NDArray[Any]:
    """Values for `rows` rows of a tensor, of the type that a published checkpoint has it in.

    Args:
      random: where they come from.
      name: the Hugging Face name of the tensor.
      shape: the shape of the whole tensor.
      rows: how many rows.
    """
    part = (rows, *shape[1:])
    if name.endswith("_blocks"):
        return random.integers(0, 256, part, dtype=np.uint8)
    if name.endswith("_scales"):
        exponent = round(math.log2(1 / (_FP4_RMS * math.sqrt(32 * shape[-1]))))
        return random.integers(126 + exponent, 129 + exponent, part, dtype=np.uint8)
    mean, deviation = _distribution(name, shape)
    return (mean + deviation * random.standard_normal(part, dtype=np.float32)).astype(_BFLOAT16)


def _distribution(name: str, shape: Sequence[int]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor's values."""
    if "norm" in name:
        return 1.0, 0.1
    if name.endswith("sinks"):
        return 0.0, 2.0
    if name == "model.embed_tokens.weight":
        return 0.0, 1.0
    if name.endswith(("bias", "gate_up_proj_bias", "down_proj_bias")):
        return 0.0, 0.1
    gain = {"lm_head.weight": 5.0, "router.weight": 2.0}
    return 0.0, next((g for end, g in gain.items() if name.endswith(end)), 1.0) / math.sqrt(shape[-1])


class RandomSource:
    """The tensors of a model with random weights, experts in MXFP4 (see `TensorSource`).

    A value depends on the seed, the tensor's name and the place in the tensor, so not on what is read in one piece.

    Attributes:
      config: the hyperparameters of the model.
      quantized: True.
    """

    def __init__(self, config: GptOssConfig, seed: int = 0):
        """Draws nothing yet.

        Raises:
          ValueError: the widths are not multiples of the block of MXFP4.
        """
        self.config = config
        self.quantized = True
        self._seed = seed
        self._shapes = {name: shape for name, (shape, _) in expected_tensors(config, True).items()}

    def check_dtype(self, dtype: np.dtype[Any]) -> None:
        """Does nothing: the tensors are the source."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of a tensor's elements."""
        return _UINT8 if name.endswith(("_blocks", "_scales")) else _BFLOAT16

    def where(self, name: str) -> str:
        """What to call a tensor in messages."""
        return f"random weights: {name}"

    def read(self, name: str, *index: slice) -> np.ndarray:
        """The part of a tensor that slices of its leading axes select."""
        shape = self._shapes[name]
        (start, stop), *rest = slice_bounds(index, shape)
        columns = tuple(np.s_[a:b] for a, b in rest)
        out = np.empty((stop - start, *(b - a for a, b in rest)), self.dtype(name))
        rows = max(1, _DRAWN_AT_ONCE // math.prod(shape[1:]))
        for group in range(start // rows, -(-stop // rows)):
            first, count = group * rows, min(rows, shape[0] - group * rows)
            drawn = draw_rows(self._random(name, group), name, shape, count)
            wanted = slice(max(start, first), min(stop, first + count))
            out[wanted.start - start : wanted.stop - start] = drawn[
                (slice(wanted.start - first, wanted.stop - first), *columns)
            ]
        return out

    def _random(self, name: str, group: int) -> np.random.Generator:
        key = [self._seed, zlib.crc32(name.encode()) | group << 32]
        return np.random.Generator(np.random.Philox(key=key))
