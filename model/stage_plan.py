"""How the layers of a model are divided into pipeline stages that all run the same program.

Every stage runs the same list of layer kinds, the pattern. A stage whose layers do not fill the pattern leaves some of
its slots empty: an empty slot passes activations through and does no data-dependent work.

    36 alternating layers (S sliding, F full) on 8 stages: pattern S F S F S F
      stage 0: S F S F S .     stage 1: . F S F S F     ...
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class StagePlan:
    """Which layer each slot of each stage holds.

    Attributes:
      pattern: the layer kind of each slot, the same for all stages.
      layers: `[stage][slot]`, the global index of the layer or None for an empty slot.
    """

    pattern: tuple[str, ...]
    layers: tuple[tuple[int | None, ...], ...]

    @property
    def unit(self) -> tuple[str, ...]:
        """The shortest run of kinds that, repeated, is the pattern; a program traces it once."""
        length = len(self.pattern)
        return next(
            self.pattern[:n]
            for n in range(1, length + 1)
            if length % n == 0 and self.pattern[:n] * (length // n) == self.pattern
        )

    @property
    def repeats(self) -> int:
        """How often the unit is repeated."""
        return len(self.pattern) // len(self.unit)

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(layer is not None for stage in self.layers for layer in stage)

    @property
    def memory_overhead(self) -> float:
        """Layer slots that the stages hold together, over the layers of the model."""
        return len(self.pattern) * len(self.layers) / self.num_layers

    @property
    def work_imbalance(self) -> float:
        """Layers of the fullest stage, over the mean."""
        most = max(sum(layer is not None for layer in stage) for stage in self.layers)
        return most * len(self.layers) / self.num_layers

    def layer_at(self, stage: int, repeat: int, slot: int) -> int | None:
        """The global index of the layer in a slot of a repeat of the unit, None if it is empty."""
        return self.layers[stage][repeat * len(self.unit) + slot]

    def location(self, layer: int) -> tuple[int, int, int]:
        """The (stage, repeat, slot of the unit) of a layer given by its global index."""
        for stage, slots in enumerate(self.layers):
            if layer in slots:
                return stage, *divmod(slots.index(layer), len(self.unit))
        raise ValueError(f"layer {layer} is not one of the {self.num_layers} layers")

    def describe(self) -> str:
        """A line for the load-time log that says what padded stages cost."""
        letters = "".join(kind[0].upper() for kind in self.pattern)
        return (
            f"{self.num_layers} layers on {len(self.layers)} stages, pattern {letters}: "
            f"{self.memory_overhead:.2f}x the layer memory, fullest stage {self.work_imbalance:.2f}x the mean"
        )


def plan_stages(layer_types: Sequence[str], pp: int) -> StagePlan:
    """Divides layers into `pp` contiguous stages with the shortest common pattern.

    Raises:
      ValueError: there are fewer layers than stages, or the kinds of the layers are so irregular that every stage would
        have to run as many layers as the whole model has.
    """
    kinds = tuple(layer_types)
    if pp > len(kinds):
        raise ValueError(f"pp={pp} stages cannot be filled by the {len(kinds)} layers of the model")
    if pp == 1:
        return StagePlan(kinds, (tuple(range(len(kinds))),))
    for length in range(-(-len(kinds) // pp), len(kinds)):
        for sizes in _partitions(len(kinds), pp):
            starts = list(itertools.accumulate(sizes, initial=0))
            stages = [range(a, b) for a, b in itertools.pairwise(starts)]
            for pattern in _candidate_patterns(kinds, length):
                slots = [_embed([kinds[i] for i in stage], pattern) for stage in stages]
                if all(s is not None for s in slots):
                    return StagePlan(
                        pattern,
                        tuple(_fill(stage, s, length) for stage, s in zip(stages, slots, strict=True) if s is not None),
                    )
    raise ValueError(
        f"layer_types cannot be split over pp={pp} stages: with kinds {list(kinds)} every stage would run as many "
        f"layers as the whole model has ({len(kinds)}); use pp=1"
    )


def _partitions(num_layers: int, pp: int) -> Iterable[tuple[int, ...]]:
    """Stage sizes that differ by at most one: the larger stages first, last, or spread."""
    small, extra = divmod(num_layers, pp)
    first = (small + 1,) * extra + (small,) * (pp - extra)
    spread = tuple((i + 1) * num_layers // pp - i * num_layers // pp for i in range(pp))
    return dict.fromkeys((first, first[::-1], spread))


def _candidate_patterns(kinds: tuple[str, ...], length: int) -> Iterable[tuple[str, ...]]:
    """Runs of the model's own layers first (they fit regular models), then all strings while they are few."""
    runs = dict.fromkeys(kinds[i : i + length] for i in range(len(kinds) - length + 1))
    yield from runs
    if length <= 10:
        yield from (p for p in itertools.product(sorted(set(kinds)), repeat=length) if p not in runs)


def _embed(stage: Sequence[str], pattern: Sequence[str]) -> list[int] | None:
    """The first slots of the pattern that hold the stage's kinds in order, or None."""
    slots, slot = [], 0
    for kind in stage:
        while slot < len(pattern) and pattern[slot] != kind:
            slot += 1
        if slot == len(pattern):
            return None
        slots.append(slot)
        slot += 1
    return slots


def _fill(stage: range, slots: Sequence[int], length: int) -> tuple[int | None, ...]:
    row: list[int | None] = [None] * length
    for layer, slot in zip(stage, slots, strict=True):
        row[slot] = layer
    return tuple(row)
