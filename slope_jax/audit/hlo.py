"""The exchanges in the text of a compiled program: of what kind, how large, between whom, and how often.

    ENTRY %main ... {
      %w = (...) while(%t), condition=%c, body=%b, backend_config={... "known_trip_count":{"n":"18"} ...}
    }
    %b (...) -> ... {
      %p = u16[127,2,64]{2,1,0} collective-permute(%x), source_target_pairs={{0,1}}, metadata={op_name="jit(f)/..."}
    }

An exchange inside nested loops is found once, with the loops and branches around it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

# How the operations are called in HLO, and here.
OPERATIONS = {
    "all-to-all": "all_to_all",
    "collective-permute": "ppermute",
    "all-gather": "all_gather",
    "all-reduce": "psum",
    "reduce-scatter": "psum_scatter",
}
_UNREADABLE = ("ragged-all-to-all", "collective-broadcast", "send", "recv")

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop around an exchange.

    Attributes:
      op_name: the path of named scopes in which the loop was written.
      trip_count: how often it runs, None when data decides.
    """

    op_name: str
    trip_count: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A branch around an exchange.

    Attributes:
      op_name: the path of named scopes in which the conditional was written.
      index: which of its branches this is; for a condition, 0 is the branch of False as in `lax.cond`.
    """

    op_name: str
    index: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective operation of a compiled program.

    Attributes:
      operation: one of the values of `OPERATIONS`.
      operand_bytes: bytes of what a device puts in.
      groups: the devices that exchange with each other, or for "ppermute" the pairs (from, to), as positions in the
        flattened mesh.
      op_name: the path of named scopes in which it was written; empty for what the compiler has added.
      around: the loops and branches around it, outermost first.
    """

    operation: str
    operand_bytes: int
    groups: Groups
    op_name: str
    around: tuple[Loop | Branch, ...]

    @property
    def ranks(self) -> int:
        """How many devices exchange with each other."""
        return max((len(group) for group in self.groups), default=1)

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of the mesh along which it moves data; none if each device keeps its own.

        Args:
          sizes: of the axes of the mesh, outermost first.

        Raises:
          ValueError: it is not an exchange along whole axes.
        """
        where = np.stack(np.unravel_index(np.arange(math.prod(sizes.values())), tuple(sizes.values())), axis=1)
        varies = np.zeros(len(sizes), bool)
        for group in self.groups:
            found = (where[list(group)] != where[group[0]]).any(axis=0)
            if self.operation != "ppermute" and math.prod(np.array(list(sizes.values()))[found]) != len(group):
                raise ValueError(
                    f"{self.op_name or self.operation}: devices {group} are not whole axes of {dict(sizes)}"
                )
            varies |= found
        return tuple(axis for axis, v in zip(sizes, varies, strict=True) if v)


def parse_exchanges(text: str) -> list[Exchange]:
    """All exchanges in the text of a compiled program, `jax.stages.Compiled.as_text()`, in its order of calls.

    Raises:
      ValueError: there is an operation between devices that this module cannot read, or no entry computation.
    """
    computations, entry = _parse(text)
    sizes = {i.name: i.num_bytes for body in computations.values() for i in body}
    return list(_walk(computations, entry, (), sizes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Instruction:
    name: str
    num_bytes: int | None
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def op_name(self) -> str:
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""


_Computations = dict[str, list[_Instruction]]


def _walk(
    computations: _Computations, name: str, around: tuple[Loop | Branch, ...], sizes: Mapping[str, int | None]
) -> Iterator[Exchange]:
    for instruction in computations[name]:
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in _UNREADABLE:
            raise ValueError(f"the compiled program has an operation that cannot be read: {opcode}")
        if opcode in OPERATIONS:
            yield Exchange(
                operation=OPERATIONS[opcode],
                operand_bytes=_operand_bytes(instruction, sizes),
                groups=_groups(instruction.attributes),
                op_name=instruction.op_name,
                around=around,
            )
            continue
        for called, inside in _called(instruction):
            yield from _walk(computations, called, around + inside, sizes)


def _called(instruction: _Instruction) -> Iterator[tuple[str, tuple[Loop | Branch, ...]]]:
    """The computations that an instruction runs, each with what that puts around its exchanges."""
    text = instruction.attributes
    if instruction.opcode == "while":
        trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', text)
        loop = Loop(op_name=instruction.op_name, trip_count=int(trips.group(1)) if trips else None)
        yield _attribute(text, "condition"), (loop,)
        yield _attribute(text, "body"), (loop,)
    elif instruction.opcode == "conditional":
        branches = re.search(r"branch_computations=\{([^}]*)\}", text)
        names = (
            re.findall(r"%([\w.\-]+)", branches.group(1))
            if branches
            else [_attribute(text, "false_computation"), _attribute(text, "true_computation")]
        )
        for index, name in enumerate(names):
            yield name, (Branch(op_name=instruction.op_name, index=index),)
    elif instruction.opcode in ("call", "fusion", "async-start"):
        yield re.findall(r"(?:to_apply|calls)=%([\w.\-]+)", text)[0], ()


def _attribute(text: str, key: str) -> str:
    match = re.search(rf"\b{key}=%([\w.\-]+)", text)
    if match is None:
        raise ValueError(f"an instruction lacks {key}: {text[:200]}")
    return match.group(1)


def _operand_bytes(instruction: _Instruction, sizes: Mapping[str, int | None]) -> int:
    total = 0
    for operand in instruction.operands:
        size = sizes[operand]
        if size is None:
            raise ValueError(f"the size of {operand}, operand of {instruction.name}, cannot be read")
        total += size
    return total


def _parse(text: str) -> tuple[_Computations, str]:
    """The instructions of each computation, and the name of the entry."""
    computations: _Computations = {}
    entry = current = None
    for line in text.splitlines():
        if current is None:
            header = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
            if header:
                current = header.group(2)
                computations[current] = []
                entry = current if header.group(1) else entry
        elif line.startswith("}"):
            current = None
        else:
            instruction = _parse_instruction(line)
            if instruction:
                computations[current].append(instruction)
    if entry is None:
        raise ValueError("the text is not that of a compiled program: it has no entry computation")
    return computations, entry


def _parse_instruction(line: str) -> _Instruction | None:
    head = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = ", line)
    if head is None:
        return None
    rest = line[head.end() :]
    shape_end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:shape_end], rest[shape_end:].lstrip()
    opcode, _, rest = rest.partition("(")
    operands_end = _closing("(" + rest) - 1
    operands = re.findall(r"%([\w.\-]+)", rest[:operands_end])
    return _Instruction(
        name=head.group(1),
        num_bytes=_num_bytes(shape),
        opcode=opcode,
        operands=tuple(operands),
        attributes=rest[operands_end + 1 :],
    )


def _closing(text: str) -> int:
    """Where the parenthesis that the text begins with is closed."""
    depth = 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return i
    raise ValueError(f"unbalanced parentheses: {text[:200]}")


def _num_bytes(shape: str) -> int | None:
    """Bytes of an array shape or of a tuple's arrays; None where there is a type without a size."""
    total = 0
    for kind, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape):
        bits = "8" if kind == "pred" else "".join(re.findall(r"^[a-z]+(\d+)", kind))
        if not bits:
            return None
        total += math.prod(int(n) for n in dims.split(",") if n) * int(bits) // 8
    return total


def _groups(attributes: str) -> Groups:
    pairs = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", attributes)
    if pairs:
        return _listed(pairs.group(1))
    listed = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if listed:
        return _listed(listed.group(1))
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    if iota:
        shape, of, order = ([int(n) for n in part.split(",")] if part else [] for part in iota.groups())
        ids = np.arange(math.prod(of)).reshape(of)
        ids = ids.transpose(order) if order else ids
        return tuple(tuple(row) for row in ids.reshape(shape).tolist())
    mesh = re.search(r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+',?)+)\}", attributes)
    if mesh:
        sizes = {k: int(n) for k, n in re.findall(r"'(\w+)'=(\d+)", mesh.group(1))}
        over = re.findall(r"'(\w+)'", mesh.group(2))
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        names = list(sizes)
        ids = ids.transpose([names.index(a) for a in names if a not in over] + [names.index(a) for a in over])
        return tuple(tuple(row) for row in ids.reshape(-1, math.prod(sizes[a] for a in over)).tolist())
    raise ValueError(f"the devices of an exchange cannot be read: {attributes[:200]}")


def _listed(text: str) -> Groups:
    return tuple(tuple(int(n) for n in group.split(",")) for group in re.findall(r"\{([\d,]+)\}", text))
