"""The largest buffers of a compiled program, from XLA's own plan of its memory.

The plan and the program come as serialised messages (`BufferAssignmentProto` and `HloModuleProto` of XLA), of which the
few fields that are needed are read here, since their classes are not part of JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Temporary:
    """A value that a program holds in temporary memory for a while.

    Attributes:
      num_bytes: its size.
      op_name: the path of named scopes in which it was written, "" for what the compiler added.
      instruction: the name of the instruction that makes it.
    """

    num_bytes: int
    op_name: str
    instruction: str


def largest_temporaries(compiled: jax.stages.Compiled, count: int) -> list[Temporary]:
    """The largest values in temporary memory, largest first; of those that share a place, the largest.

    Values whose places overlap in part are all listed, so the sizes may add up to more than the program needs at once.
    """
    plan = _memory_plan(compiled)
    names = _instructions(compiled)
    values = {value.get(1, 0): _message(value[3]).get(4, 0) for value in map(_message, plan[1])}
    found: list[Temporary] = []
    for allocation in plan.get(3, []):
        fields = _repeated(allocation)
        if _ENTRY_PARAMETER in fields or _CONSTANT in fields or _OUTPUT in fields or _THREAD_LOCAL in fields:
            continue
        taken: dict[int, Temporary] = {}
        for place in map(_message, fields.get(9, [])):
            name, op_name = names.get(values[place.get(1, 0)], ("", ""))
            value = Temporary(place.get(3, 0), op_name, name)
            offset = place.get(2, 0)
            # An instruction without a scope of its own only passes the value of another on.
            taken[offset] = max(taken.get(offset, value), value)
        found += taken.values()
    return sorted(found, reverse=True)[:count]


# Fields of BufferAllocationProto that are present when they are true.
_THREAD_LOCAL, _ENTRY_PARAMETER, _OUTPUT, _CONSTANT = 3, 5, 7, 12


def _memory_plan(compiled: jax.stages.Compiled) -> dict[int, list[Any]]:
    analysis: Any = compiled.memory_analysis()
    return _repeated(analysis.serialized_buffer_assignment_proto)


def _instructions(compiled: jax.stages.Compiled) -> dict[int, tuple[str, str]]:
    """The name and scopes of each instruction, by its id."""
    executable: Any = compiled.runtime_executable()
    found = {}
    for module in executable.hlo_modules():
        for computation in _repeated(module.as_serialized_hlo_module_proto()).get(3, []):
            for instruction in _repeated(computation).get(2, []):
                fields = _message(instruction)
                op_name = _message(fields.get(7, b"")).get(2, b"")
                found[fields.get(35, 0)] = fields[1].decode(), op_name.decode()
    return found


def _message(data: bytes) -> dict[int, Any]:
    """The last value of each field of a message."""
    return {number: values[-1] for number, values in _repeated(data).items()}


def _repeated(data: bytes) -> dict[int, list[Any]]:
    """The values of each field of a message: integers, or bytes."""
    fields: dict[int, list[Any]] = {}
    for number, value in _fields(memoryview(data)):
        fields.setdefault(number, []).append(value)
    return fields


def _fields(data: memoryview) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire_type == 2:
            size, at = _varint(data, at)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"not a message that can be read: wire type {wire_type}")
        yield number, bytes(data[at : at + size])
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
