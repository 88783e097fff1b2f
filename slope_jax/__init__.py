"""slope_jax: a sharded prefill engine for gpt-oss in JAX."""

from slope_jax.engine import Engine, TickRecord
from slope_jax.kv.files import PrefillKV, load_kv
from slope_jax.mesh.axes import MeshShape
from slope_jax.request import Request
from slope_jax.result import PrefillResult

__all__ = ["Engine", "MeshShape", "PrefillKV", "PrefillResult", "Request", "TickRecord", "load_kv"]
