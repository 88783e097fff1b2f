"""What a running engine can expect: the planner's time to first token, corrected by what the engine really took."""

from __future__ import annotations

import functools
import math

from slope_jax.execution.spec import TickPrograms
from slope_jax.planner.devices import Cluster
from slope_jax.planner.evaluate import predict
from slope_jax.planner.layout import EXPERT, SEQUENCE, TENSOR, Layout


class Forecast:
    """The time to first token of a prompt that is alone, times a running factor of actual over predicted time.

    The factor is the mean of the logarithms, in which an observation fades as others follow, so that one slow prompt
    moves it little and a slower machine is followed.

    Args:
      programs: of the engine.
      cluster: the machine, best one that was calibrated.
      fading: weight of the newest observation.

    Raises:
      ValueError: `fading` is not between 0 and 1.
    """

    def __init__(self, programs: TickPrograms, cluster: Cluster, *, fading: float = 0.1):
        if not 0 < fading < 1:
            raise ValueError(f"fading must be between 0 and 1, not {fading}")
        split = EXPERT if programs.expert_parallel else TENSOR if programs.split.ranks > 1 else SEQUENCE
        self._layout = Layout(
            shape=programs.shape,
            chunk_tokens=programs.chunk_tokens,
            split=split,
            expert_weights="mxfp4" if programs.packed_experts else "bfloat16",
            dtype=programs.dtype,
        )
        self._config, self._cluster, self._fading = programs.config, cluster, fading
        self._mean = 0.0
        self._weight = 0.0
        self.predicted = functools.lru_cache(maxsize=1024)(self._predicted)

    @property
    def factor(self) -> float:
        """Actual over predicted time; 1 before anything was observed."""
        return math.exp(self._mean / self._weight) if self._weight else 1.0

    def __call__(self, num_tokens: int) -> float:
        """Seconds to the first token of a prompt of so many tokens."""
        return self.factor * self.predicted(num_tokens)

    def observe(self, num_tokens: int, ttft_s: float) -> None:
        """Takes note of a prompt that was alone.

        Raises:
          ValueError: the time is not positive.
        """
        if not ttft_s > 0:
            raise ValueError(f"a time to first token must be positive, not {ttft_s}")
        self._mean += self._fading * (math.log(ttft_s / self.predicted(num_tokens)) - self._mean)
        self._weight += self._fading * (1 - self._weight)

    def _predicted(self, num_tokens: int) -> float:
        return predict(self._config, self._cluster, self._layout, num_tokens).ttft_s
