"""Tries every way to lay a model out on a cluster, and ranks what each promises against a target."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

from slope_jax.execution.spec import EXPERT_WEIGHTS
from slope_jax.mesh import ring_policy
from slope_jax.mesh.axes import MeshShape
from slope_jax.mesh.layout import smallest_bucket
from slope_jax.model.config import GptOssConfig
from slope_jax.planner.devices import Cluster
from slope_jax.planner.evaluate import Prediction, predict
from slope_jax.planner.layout import EXPERT, SEQUENCE, SPLITS, TENSOR, Layout, refusal

MODEL_ERROR = 0.05  # relative difference of two times below which the model does not tell them apart
_CHUNK_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_BASELINE_CHUNK = 8192  # what servers with tensor parallelism take


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What may be tried.

    Attributes:
      expert_weights: the formats of the experts: "mxfp4", which is small and takes time to unpack in every tick, and
        "bfloat16", the only one for a model whose experts are not in MXFP4.
      splits: what the ulysses ranks may do, see `layout.Layout`.
      ring_pass: what goes round the ring, see `mesh.pass_choice`.
    """

    expert_weights: tuple[str, ...] = EXPERT_WEIGHTS
    splits: tuple[str, ...] = SPLITS
    ring_pass: str = ring_policy.AUTO


ALL = Choices()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A mesh that cannot be used, with the reason."""

    shape: MeshShape
    split: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was found for prompts of one length.

    Attributes:
      num_tokens: tokens of a prompt.
      target_s: the target for TTFT, None when there is none.
      best: the best of each mesh and split, best first.
      baseline: tensor parallelism on each node, a replica per node; None where it does not fit.
      refused: what does not fit, with the reasons.
      tried: how many configurations were looked at.
      choices: what could be tried.
    """

    num_tokens: int
    target_s: float | None
    best: tuple[Prediction, ...]
    baseline: Prediction | None
    refused: tuple[Refused, ...]
    tried: int
    choices: Choices

    def ties(self) -> tuple[Prediction, ...]:
        """Those of `best` that the model does not tell from the first one."""
        return tuple(p for p in self.best if self.is_tie(p))

    def is_tie(self, other: Prediction) -> bool:
        """Whether the model's error is larger than the difference to the best, both in TTFT and in rate."""
        first = self.best[0]
        slower = other.ttft_s <= first.ttft_s * (1 + MODEL_ERROR)
        return slower and other.requests_per_s >= first.requests_per_s * (1 - MODEL_ERROR)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answers for all lengths.

    Attributes:
      config: the model.
      cluster: the machine.
      answers: one per length.
      seconds: that the search took.
    """

    config: GptOssConfig
    cluster: Cluster
    answers: tuple[Answer, ...]
    seconds: float


def plan(
    config: GptOssConfig,
    cluster: Cluster,
    tokens: Sequence[int],
    ttft_slo: Sequence[float] | None = None,
    choices: Choices = ALL,
) -> Plan:
    """Finds the best ways to prefill prompts of some lengths on a cluster.

    With a target, the ways that meet it come first, the one with the highest concurrency within the target leading, and
    the one with the lowest TTFT among equals. Without a target, or where none meets it, the lowest TTFT leads.

    Args:
      config: the model.
      cluster: the machine.
      tokens: lengths of prompts.
      ttft_slo: the target for TTFT in seconds, one for each length; None for no targets.
      choices: what may be tried.

    Raises:
      ValueError: there is no length, a length or a target is out of range, there are more of one than of the other, or
        nothing fits on the cluster; the message has the numbers.
    """
    begin = time.perf_counter()
    targets = check_lengths(config, tokens, ttft_slo)
    answers = tuple(
        answer(config, cluster, length, target, choices) for length, target in zip(tokens, targets, strict=True)
    )
    return Plan(config=config, cluster=cluster, answers=answers, seconds=time.perf_counter() - begin)


def check_lengths(config: GptOssConfig, tokens: Sequence[int], ttft_slo: Sequence[float] | None) -> list[float | None]:
    """The target of each length, None where there is none.

    Raises:
      ValueError: there is no length, one that the model does not take, not a target for each, or one out of range.
    """
    if not tokens:
        raise ValueError("there is no length of prompts to plan for")
    for length in tokens:
        if not 0 < length <= config.max_position:
            raise ValueError(f"a prompt of {length} tokens: the model takes 1 to {config.max_position}")
    if ttft_slo is None:
        return [None] * len(tokens)
    if len(ttft_slo) != len(tokens):
        raise ValueError(f"there are {len(tokens)} lengths of prompts and {len(ttft_slo)} targets; give one for each")
    for target in ttft_slo:
        if not 0 < target < math.inf:
            raise ValueError(f"a target for TTFT must be a positive number of seconds, not {target}")
    return list(ttft_slo)


def answer(
    config: GptOssConfig,
    cluster: Cluster,
    num_tokens: int,
    target_s: float | None,
    choices: Choices = ALL,
) -> Answer:
    """Tries all configurations for one length (see `plan`)."""
    best: list[Prediction] = []
    refused: list[Refused] = []
    tried = 0
    for shape, split in meshes(cluster.num_devices, choices.splits):
        found = of_mesh(config, cluster, shape, split, num_tokens, choices)
        if isinstance(found, Refused):
            refused.append(found)
            continue
        tried += len(found)
        best.append(min(found, key=lambda p: rank(p, target_s)))
    if not best:
        reasons = "; ".join(f"{r.shape} {r.split}: {r.reason}" for r in refused[-3:])
        raise ValueError(
            f"no way to run prompts of {num_tokens} tokens on {cluster.num_devices} devices of {cluster.device} fits: "
            f"{reasons}"
        )
    return Answer(
        num_tokens=num_tokens,
        target_s=target_s,
        best=tuple(sorted(best, key=lambda p: rank(p, target_s))),
        baseline=baseline(config, cluster, num_tokens, choices),
        refused=tuple(refused),
        tried=tried,
        choices=choices,
    )


def rank(prediction: Prediction, target_s: float | None) -> tuple[float, ...]:
    """Sorts predictions, the best first."""
    served = 0 if target_s is None else prediction.concurrency_within(target_s)
    # A tenth of a percent is no reason to prefer one number of chunks to another.
    return -served, float(f"{prediction.ttft_s:.3g}"), -float(f"{prediction.requests_per_s:.3g}"), prediction.chunks


def meshes(devices: int, splits: Sequence[str] = SPLITS) -> Iterator[tuple[MeshShape, str]]:
    """Every mesh of which a number of equal replicas uses all devices, and what its ulysses ranks may do."""
    for size in _divisors(devices):
        for pp in _divisors(size):
            for ring in _divisors(size // pp):
                shape = MeshShape(pp=pp, ring=ring, ulysses=size // pp // ring)
                for split in splits if shape.ulysses > 1 else (SEQUENCE,):
                    yield shape, split


def of_mesh(
    config: GptOssConfig,
    cluster: Cluster,
    shape: MeshShape,
    split: str,
    num_tokens: int,
    choices: Choices = ALL,
) -> list[Prediction] | Refused:
    """The predictions for all numbers of chunks and formats of experts on a mesh; or why it cannot be used."""
    replicas = cluster.num_devices // shape.num_devices
    reasons = []
    found = []
    if split == EXPERT and config.num_experts == 1:
        return Refused(shape=shape, split=split, reason="expert parallelism needs experts: the model is dense")
    for layout in _layouts(config, shape, split, num_tokens, choices.expert_weights):
        reason = refusal(config, layout, cluster, num_tokens)
        if reason is None:
            found.append(predict(config, cluster, layout, num_tokens, replicas=replicas, ring_pass=choices.ring_pass))
        else:
            reasons.append(reason)
    return found or Refused(shape=shape, split=split, reason=reasons[-1])


def _layouts(
    config: GptOssConfig, shape: MeshShape, split: str, num_tokens: int, expert_weights: Sequence[str]
) -> Iterator[Layout]:
    """The chunk sizes that are worth trying, with every format of the experts; the one that needs least comes last."""
    smallest = smallest_bucket(shape, config.sliding_window)
    for count in _CHUNK_COUNTS:
        chunk = -(-num_tokens // count)
        # Many chunks gain nothing without a pipeline, and in one no more than a few times its stages do.
        if count > 1 and (chunk < smallest or count > 4 * shape.pp):
            return
        for packing in sorted(expert_weights):
            yield Layout(shape=shape, chunk_tokens=chunk, split=split, expert_weights=packing)


def baseline(config: GptOssConfig, cluster: Cluster, num_tokens: int, choices: Choices = ALL) -> Prediction | None:
    """Tensor parallelism over the devices of a node, a replica on each node; None where it does not fit."""
    size = cluster.devices_per_node
    chunks = -(-num_tokens // _BASELINE_CHUNK)
    found = []
    for packing in choices.expert_weights:
        layout = Layout(
            shape=MeshShape(ulysses=size),
            chunk_tokens=-(-num_tokens // chunks),
            split=TENSOR if size > 1 else SEQUENCE,
            expert_weights=packing,
        )
        if refusal(config, layout, cluster, num_tokens) is None:
            found.append(predict(config, cluster, layout, num_tokens, replicas=cluster.nodes))
    return min(found, key=lambda p: p.ttft_s, default=None)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
