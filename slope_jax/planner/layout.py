"""How a model is laid out on devices, and what that takes of their memory."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp

from slope_jax.execution.spec import DTYPES
from slope_jax.mesh import all_reduce
from slope_jax.mesh.axes import MeshShape
from slope_jax.model.config import GptOssConfig
from slope_jax.model.counts import cost
from slope_jax.model.parallel.tensor_split import TensorSplit
from slope_jax.model.stage_plan import StagePlan, plan_stages
from slope_jax.planner.devices import Cluster
from slope_jax.planner.quantity import LOW

# Values of the ulysses axis: what its ranks do with a layer.
SEQUENCE, EXPERT, TENSOR = "sequence", "expert", "tensor"
SPLITS = (SEQUENCE, EXPERT, TENSOR)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to run a model.

    Attributes:
      shape: the mesh of one replica.
      chunk_tokens: the longest chunk.
      split: what the ulysses ranks do. `SEQUENCE`: they exchange tokens for heads and hold all experts. `EXPERT`: the
        same, with the experts split over them. `TENSOR`: they hold all tokens, and part of all heads and experts.
      expert_weights: "mxfp4" (packed) or "bfloat16".
      dtype: "bfloat16" or "float32".
    """

    shape: MeshShape
    chunk_tokens: int
    split: str = SEQUENCE
    expert_weights: str = "mxfp4"
    dtype: str = "bfloat16"

    @property
    def token_ranks(self) -> int:
        """Ranks among which the tokens of a chunk are divided."""
        return self.shape.ring * (1 if self.split == TENSOR else self.shape.ulysses)

    @property
    def tensor_split(self) -> TensorSplit:
        """Over how many ulysses ranks the layers are divided."""
        return TensorSplit.of(self.shape.ulysses, self.all_reduce)

    @property
    def all_reduce(self) -> str | None:
        """The form of the sum of tensor parallelism, in which values travel in the compute dtype; None without it."""
        return all_reduce.TREE if self.split == TENSOR else None

    def __str__(self) -> str:
        tail = {SEQUENCE: "", EXPERT: " EP", TENSOR: " TP"}[self.split]
        return f"{self.shape}{tail}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a device, by part.

    Attributes:
      weights: those of empty slots included.
      kv: of the prompts that are under way at once.
      activations: the arrays that grow with a chunk, and the compiled program's needs beside them.
      reserve: left to the runtime.
      capacity: what the device has.
      kv_of_prompt: of one prompt.
    """

    weights: int
    kv: int
    activations: int
    reserve: int
    capacity: int
    kv_of_prompt: int

    @property
    def total(self) -> int:
        """What is used, the reserve included."""
        return self.weights + self.kv + self.activations + self.reserve

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.total <= self.capacity

    @property
    def prompts(self) -> int:
        """How many prompts of the length fit at once, none if the weights do not."""
        room = self.capacity - self.total + self.kv
        return max(room // max(self.kv_of_prompt, 1), 0)


@functools.lru_cache(maxsize=256)
def stages_of(layer_types: tuple[str, ...], pp: int) -> StagePlan:
    """`plan_stages`, remembered."""
    return plan_stages(layer_types, pp)


def memory(config: GptOssConfig, layout: Layout, cluster: Cluster, num_tokens: int, prompts: int = 1) -> Memory:
    """What a layout takes of a device's memory, with `prompts` prompts of `num_tokens` tokens under way."""
    shape, dtype = layout.shape, DTYPES[layout.dtype]
    plan = stages_of(config.layer_types, shape.pp)
    weights = cost.device_weight_bytes(
        config,
        plan,
        shape,
        dtype,
        packed=layout.expert_weights == "mxfp4",
        expert_parallel=layout.split == EXPERT,
        split=layout.tensor_split,
    )
    cache = cost.cache_bytes(config, plan, shape, dtype)
    of_prompt = -(-num_tokens // shape.ring) * cache.slot + cache.request
    chunk = min(layout.chunk_tokens, num_tokens)
    activations = cost.activation_bytes(config, shape, chunk, dtype, layout.tensor_split)
    # The product with gates and ups is the largest value that the formula leaves out.
    pairs = config.experts_per_token * chunk / layout.token_ranks
    width = layout.tensor_split.share(config).intermediate_size
    inner = int(pairs * 2 * width) * jnp.dtype(dtype).itemsize
    # Devices that share cores are of one machine, and share its memory too.
    capacity = cluster.memory_bytes // (shape.num_devices if cluster.shares_cores else 1)
    return Memory(
        weights=weights.total,
        kv=prompts * of_prompt,
        activations=activations.peak + inner,
        reserve=int(capacity * cluster.curve("memory_reserve")()),
        capacity=capacity,
        kv_of_prompt=of_prompt,
    )


def refusal(config: GptOssConfig, layout: Layout, cluster: Cluster, num_tokens: int) -> str | None:
    """Why a layout cannot run prompts of `num_tokens` tokens, in words; None when it can."""
    shape = layout.shape
    try:
        shape.check_heads(config.num_heads, config.num_kv_heads)
        if layout.split == EXPERT:
            shape.check_experts(config.num_experts)
        stages_of(config.layer_types, shape.pp)
    except ValueError as error:
        return str(error)
    if layout.split != SEQUENCE and shape.ulysses == 1:
        return f"{layout.split} parallelism needs several ulysses ranks"
    if shape.num_devices > cluster.num_devices:
        return f"the mesh {shape} needs {shape.num_devices} devices, but there are {cluster.num_devices}"
    if not 0 < num_tokens <= config.max_position:
        return f"a prompt of {num_tokens} tokens: the model takes 1 to {config.max_position}"
    needed = memory(config, layout, cluster, num_tokens)
    if not needed.fits:
        parts = ", ".join(
            f"{name} {size / 1e9:.1f}"
            for name, size in (
                ("weights", needed.weights),
                ("KV", needed.kv),
                ("activations", needed.activations),
                ("reserve", needed.reserve),
            )
        )
        share = cluster.curve("memory_reserve").moved(LOW)()
        least = needed.total - needed.reserve + int(share * needed.capacity)
        fits = f"; it would with the least reserve that is assumed, {share:.0%}" if least <= needed.capacity else ""
        return f"needs {needed.total / 1e9:.1f} GB of the {needed.capacity / 1e9:.1f} GB of a device ({parts}){fits}"
    return None
