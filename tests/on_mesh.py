"""Runs a function inside `shard_map` on a small mesh, as the model's modules are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from slope_jax.mesh.axes import MeshShape, make_mesh


def run(function: Callable[..., Any], *args: Any, shape: MeshShape = MeshShape()) -> Any:  # noqa: B008
    """The result of a function of replicated arguments on one device, or the first device of a mesh."""

    def per_device(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[None, None, None], function(*args))

    mesh = make_mesh(shape)
    in_specs, out_specs = P(), P(*mesh.axis_names)
    # The function may give the same on all devices, which is all right here, but not what out_specs says.
    out = jax.jit(jax.shard_map(per_device, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))(*args)
    return jax.tree.map(lambda x: x[0, 0, 0], out)
