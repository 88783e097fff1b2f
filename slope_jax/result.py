"""What a prefill returns."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from slope_jax.kv.files import PrefillKV

NO_TOKEN = -1  # the token id of a result with an error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillResult:
    """The first token of a prompt, and what an engine needs to decode from there.

    Attributes:
      request_id: the id of the request.
      num_tokens: the tokens of the prompt.
      token_id: the first token after the prompt, `NO_TOKEN` when there is an error.
      logits: `[vocab]` float32, of the last position of the prompt.
      ttft_s: seconds from the call of `Engine.prefill` to this request's first token.
      kv: the KV cache of the prompt.
      error: why there is no first token (the model's logits are not numbers), otherwise None.
    """

    request_id: str
    num_tokens: int
    token_id: int
    logits: NDArray[np.float32]
    ttft_s: float
    kv: PrefillKV
    error: str | None = None
