"""Exchanges are found in compiled programs with their sizes, devices, loops and branches."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from slope_jax.audit import hlo
from slope_jax.mesh.axes import AXES, PER_DEVICE, MeshShape, make_mesh

SIZES = {"pp": 2, "ring": 2, "ulysses": 2}


def exchanges_of(function: Callable[..., jax.Array], *shape: int, dtype: str = "float32") -> list[hlo.Exchange]:
    """The exchanges of a function of this device's array and of a number, compiled for a mesh of 2x2x2."""
    mesh = make_mesh(MeshShape(*SIZES.values()))

    def per_device(x: jax.Array, n: jax.Array) -> jax.Array:
        return function(x[0, 0, 0], n)[None, None, None]

    sharded = jax.shard_map(per_device, mesh=mesh, in_specs=(PER_DEVICE, P()), out_specs=PER_DEVICE, check_vma=False)
    x = jax.ShapeDtypeStruct((2, 2, 2, *shape), dtype, sharding=jax.NamedSharding(mesh, PER_DEVICE))
    text = jax.jit(sharded).lower(x, jax.ShapeDtypeStruct((), jnp.int32)).compile().as_text()
    assert text is not None
    return hlo.parse_exchanges(text)


ring_pairs = [(0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("function", "operation", "axes", "operand_bytes", "ranks"),
    [
        (lambda x, n: jax.lax.psum(x, "ring"), "psum", ("ring",), 1600, 2),
        (lambda x, n: jax.lax.psum(x, ("pp", "ulysses")), "psum", ("pp", "ulysses"), 1600, 4),
        (lambda x, n: jax.lax.all_gather(x, AXES, tiled=True), "all_gather", AXES, 1600, 8),
        (lambda x, n: jax.lax.psum_scatter(x, "pp", tiled=True), "psum_scatter", ("pp",), 1600, 2),
        (lambda x, n: jax.lax.all_to_all(x, "ulysses", 0, 0, tiled=True), "all_to_all", ("ulysses",), 1600, 2),
        (
            lambda x, n: jax.lax.all_to_all(x, ("ring", "ulysses"), 0, 0, tiled=True),
            "all_to_all",
            ("ring", "ulysses"),
            1600,
            4,
        ),
        (lambda x, n: jax.lax.ppermute(x[:3], "ring", ring_pairs), "ppermute", ("ring",), 60, 2),
        (lambda x, n: jax.lax.ppermute(x, "pp", [(0, 1)]), "ppermute", ("pp",), 1600, 2),
    ],
)
def test_kind_size_and_axes(
    function: Callable[..., jax.Array], operation: str, axes: tuple[str, ...], operand_bytes: int, ranks: int
) -> None:
    (found,) = exchanges_of(function, 80, 5)
    assert (found.operation, found.axes(SIZES), found.operand_bytes) == (operation, axes, operand_bytes)
    assert found.ranks == ranks
    assert found.around == ()


def test_types_of_two_bytes() -> None:
    (found,) = exchanges_of(lambda x, n: jax.lax.ppermute(x, "ring", ring_pairs), 7, 11, dtype="uint16")
    assert found.operand_bytes == 7 * 11 * 2


def test_loops_and_scopes_around_an_exchange() -> None:
    def function(x: jax.Array, n: jax.Array) -> jax.Array:
        def inner(i: jax.Array, x: jax.Array) -> jax.Array:
            with jax.named_scope("rotate"):
                return jnp.sin(jax.lax.ppermute(x, "ring", ring_pairs))

        def outer(i: jax.Array, x: jax.Array) -> jax.Array:
            with jax.named_scope("layer"):
                return jax.lax.psum(jax.lax.fori_loop(0, n, inner, x), "ulysses")

        return jax.lax.fori_loop(0, 5, outer, x)

    found = {e.operation: e for e in exchanges_of(function, 80, 5)}
    assert set(found) == {"ppermute", "psum"}
    fixed, dynamic = found["ppermute"].around
    assert isinstance(fixed, hlo.Loop)
    assert isinstance(dynamic, hlo.Loop)
    assert (fixed.trip_count, dynamic.trip_count) == (5, None)
    assert found["psum"].around == (fixed,)
    assert "layer" in dynamic.op_name.split("/")
    assert "layer" not in fixed.op_name.split("/")
    assert {"layer", "rotate"} <= set(found["ppermute"].op_name.split("/"))
    assert "rotate" not in found["psum"].op_name.split("/")


def test_branches_around_an_exchange() -> None:
    def function(x: jax.Array, n: jax.Array) -> jax.Array:
        with jax.named_scope("choice"):
            return jax.lax.cond(
                n > 3,
                lambda x: jax.lax.psum(x, "ulysses"),
                lambda x: jnp.sin(jax.lax.ppermute(x, "ring", ring_pairs)),
                x,
            )

    found = {e.operation: e for e in exchanges_of(function, 80, 5)}
    for operation, index in (("psum", 1), ("ppermute", 0)):
        (branch,) = found[operation].around
        assert isinstance(branch, hlo.Branch)
        assert branch.index == index
        assert "choice" in branch.op_name.split("/")


def module(instruction: str) -> str:
    return (
        f"HloModule m\n\nENTRY %main (p: f32[6]) -> f32[6] {{\n  %p = f32[6]{{0}} parameter(0)\n  {instruction}\n}}\n"
    )


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("ulysses",)),
        ("[4,2]<=[8]", ("ulysses",)),
        ("[4,2]<=[4,2]T(0,1)", ("ulysses",)),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("ring",)),
        ("[2,4]<=[2,4]T(1,0)", ("pp", "ulysses")),
        ("[2,4]<=[4,2]T(1,0)", ("pp", "ring")),
        ("mesh['a'=2,'b'=2,'c'=2] {'b'}", ("ring",)),
        ("mesh['a'=2,'b'=4] {'a'}", ("pp",)),
        ("mesh['a'=8] {'a'}", AXES),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("{{0,3},{1,2},{4,7},{5,6}}", None),
    ],
)
def test_ways_to_write_groups(groups: str, axes: tuple[str, ...] | None) -> None:
    """None: the groups are not whole axes of the mesh."""
    line = f"  ROOT %a = f32[6]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add"
    (found,) = hlo.parse_exchanges(module(line))
    assert found.operand_bytes == 24
    assert math.prod(len(g) for g in found.groups[:1]) * len(found.groups) == 8
    if axes is None:
        with pytest.raises(ValueError, match="not whole axes"):
            found.axes(SIZES)
    else:
        assert found.axes(SIZES) == axes


def test_asynchronous_exchange_counts_once() -> None:
    lines = (
        "  %s = (f32[6]{0}, f32[6]{0:T(8,128)}, u32[], u32[]) collective-permute-start(%p), channel_id=1, "
        'source_target_pairs={{0,1},{1,0}}, metadata={op_name="a/ring/b"}\n'
        "  ROOT %d = f32[6]{0} collective-permute-done(%s)"
    )
    (found,) = hlo.parse_exchanges(module(lines))
    assert (found.operation, found.operand_bytes, found.groups) == ("ppermute", 24, ((0, 1), (1, 0)))
    assert found.op_name == "a/ring/b"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("  ROOT %a = f32[6]{0} ragged-all-to-all(%p, %p), replica_groups={}", "ragged-all-to-all"),
        ("  ROOT %a = f32[6]{0} all-reduce(%p), replica_groups=new_style", "new_style"),
        ("  ROOT %a = f32[6]{0} all-reduce(%p), replica_groups=mesh['a'=8] {'a':(2)2}", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hlo.parse_exchanges(module(line))


def test_text_of_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.parse_exchanges("module @jit_f {}")
