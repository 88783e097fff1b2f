"""gpt-oss in float64 NumPy: the reference that the engine is compared with.

It shares no code with the engine and follows the formulas in the plainest order: the whole prompt at once, one
attention head at a time, one expert at a time. Sizes in comments: T tokens, D model width, N query heads, K KV heads,
H head_dim, E experts, F expert width, X experts per token, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Array: TypeAlias = NDArray[np.float64]
SLIDING = "sliding_attention"
FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the forward needs of config.json."""

    layer_types: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    experts_per_token: int
    window: int
    norm_eps: float
    swiglu_limit: float
    swiglu_alpha: float
    rope: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A configuration and all tensors in float64, expert products as `[E, out, in]`."""

    config: Config
    tensors: dict[str, Array]


def forward(
    directory: str | pathlib.Path,
    token_ids: list[int],
    *,
    all_positions: bool = False,
    router_logits: list[Array] | None = None,
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Runs a prompt.

    Args:
      directory: of the checkpoint.
      token_ids: the prompt.
      all_positions: whether to return the logits of all positions.
      router_logits: a list to which the router logits `[T, E]` of each layer are appended.

    Returns:
      Logits `[V]` of the last position, or `[T, V]` with `all_positions`; and for each layer the keys (after RoPE) and
      values `[T, K, H]` of all tokens, also in the sliding layers.
    """
    checkpoint = load(directory)
    config, tensors = checkpoint.config, checkpoint.tensors
    cos, sin = rope_tables(config.rope, config.head_dim, len(token_ids))
    hidden = tensors["model.embed_tokens.weight"][np.asarray(token_ids)]
    kv = []
    for i, kind in enumerate(config.layer_types):
        layer = f"model.layers.{i}."
        normed = rms_norm(hidden, tensors[layer + "input_layernorm.weight"], config.norm_eps)
        q, k, v = qkv(config, tensors, layer, normed, cos, sin)
        heads = attention(q, k, v, tensors[layer + "self_attn.sinks"], config.window if kind == SLIDING else None)
        hidden = hidden + linear(tensors, layer + "self_attn.o_proj", heads.reshape(len(heads), -1))
        normed = rms_norm(hidden, tensors[layer + "post_attention_layernorm.weight"], config.norm_eps)
        router = linear(tensors, layer + "mlp.router", normed)
        hidden = hidden + mixture_of_experts(config, tensors, layer, normed, router)
        kv.append((k, v))
        if router_logits is not None:
            router_logits.append(router)
    if not all_positions:
        hidden = hidden[-1]
    return rms_norm(hidden, tensors["model.norm.weight"], config.norm_eps) @ tensors["lm_head.weight"].T, kv


def load(directory: str | pathlib.Path) -> Checkpoint:
    """Reads a checkpoint; the last few are kept until their files change."""
    path = pathlib.Path(directory)
    files = sorted(path.glob("*.json")) + sorted(path.glob("*.safetensors"))
    return _load(path, tuple((file.name, file.stat().st_mtime_ns) for file in files))


@functools.lru_cache(maxsize=16)
def _load(path: pathlib.Path, files: tuple[tuple[str, int], ...]) -> Checkpoint:
    index = path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else {"": "model.safetensors"}
    stored: dict[str, NDArray[Any]] = {}
    for file in set(weight_map.values()):
        stored |= load_file(path / file)
    tensors: dict[str, Array] = {}
    for name, tensor in stored.items():
        if name.endswith("_proj_blocks"):
            base = name.removesuffix("_blocks")
            tensors[base] = decode_mxfp4(tensor, stored[base + "_scales"])
        elif name.endswith((".gate_up_proj", ".down_proj")):
            tensors[name] = tensor.astype(np.float64).swapaxes(1, 2)
        elif not name.endswith("_proj_scales"):
            tensors[name] = tensor.astype(np.float64)
    return Checkpoint(config=parse_config(json.loads((path / "config.json").read_text())), tensors=tensors)


def parse_config(fields: dict[str, Any]) -> Config:
    """Reads config.json, with either spelling of the rope settings."""
    rope = fields.get("rope_parameters")
    if rope is None:
        rope = {**fields["rope_scaling"], "rope_theta": fields["rope_theta"]}
    if rope["rope_type"] != "yarn":
        raise ValueError(f"rope_type {rope['rope_type']!r} is not yarn")
    return Config(
        layer_types=tuple(fields["layer_types"]),
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields["num_key_value_heads"],
        head_dim=fields["head_dim"],
        experts_per_token=fields["num_experts_per_tok"],
        window=fields["sliding_window"],
        norm_eps=fields["rms_norm_eps"],
        swiglu_limit=fields["swiglu_limit"],
        swiglu_alpha=fields.get("swiglu_alpha", 1.702),
        rope=rope,
    )


def decode_mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> Array:
    """Unpacks blocks `[..., in/32, 16]` with scale bytes `[..., in/32]` to `[..., in]`, low nibble first."""
    if (scales == 255).any():
        raise ValueError("an MXFP4 scale byte is 255, which stands for NaN")
    table = np.array(FP4_MAGNITUDES + tuple(-value for value in FP4_MAGNITUDES))
    codes = np.empty((*blocks.shape[:-1], 32), np.int64)
    codes[..., 0::2] = blocks % 16
    codes[..., 1::2] = blocks // 16
    values = table[codes] * 2.0 ** (scales.astype(np.float64) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def inverse_frequencies(rope: dict[str, Any], head_dim: int) -> Array:
    """YaRN rotation speeds `[H/2]` in radians per token (arXiv 2309.00071)."""
    theta, factor = rope["rope_theta"], rope["factor"]

    def dimension_of(rotations: float) -> float:
        """The (fractional) pair of dimensions that turns this often in the original context."""
        context = rope["original_max_position_embeddings"]
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(rope.get("beta_fast", 32)), dimension_of(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = np.arange(head_dim // 2)
    interpolated = np.clip((pairs - low) / (high - low), 0, 1)
    speed = theta ** (-2.0 * pairs / head_dim)
    mixed: Array = (1 - interpolated) * speed + interpolated * speed / factor
    return mixed


def attention_factor(rope: dict[str, Any]) -> float:
    """The factor on cos and sin: the configured one, else YaRN's 0.1 ln(factor) + 1."""
    explicit = rope.get("attention_factor")
    return 0.1 * math.log(rope["factor"]) + 1 if explicit is None else explicit


def rope_tables(rope: dict[str, Any], head_dim: int, length: int) -> tuple[Array, Array]:
    """Scaled cos and sin `[T, H/2]` of positions 0 to `length` - 1."""
    angles = np.arange(length)[:, None] * inverse_frequencies(rope, head_dim)
    return np.cos(angles) * attention_factor(rope), np.sin(angles) * attention_factor(rope)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates heads `[T, heads, H]`; the halves of a head are the two coordinates."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """Divides by the root mean square of the last axis and multiplies by the gain."""
    normed: Array = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * gain
    return normed


def linear(tensors: dict[str, Array], name: str, x: Array) -> Array:
    """Multiplies by a weight `[out, in]` and adds the bias."""
    return x @ tensors[name + ".weight"].T + tensors[name + ".bias"]


def qkv(
    config: Config, tensors: dict[str, Array], layer: str, x: Array, cos: Array, sin: Array
) -> tuple[Array, Array, Array]:
    """Queries `[T, N, H]` and keys `[T, K, H]` after RoPE, and values `[T, K, H]`."""
    T, H = len(x), config.head_dim
    q = linear(tensors, layer + "self_attn.q_proj", x).reshape(T, config.num_heads, H)
    k = linear(tensors, layer + "self_attn.k_proj", x).reshape(T, config.num_kv_heads, H)
    v = linear(tensors, layer + "self_attn.v_proj", x).reshape(T, config.num_kv_heads, H)
    return rotate(q, cos, sin), rotate(k, cos, sin), v


def visible(length: int, window: int | None) -> NDArray[np.bool_]:
    """Which keys (columns) each query (row) sees: itself and earlier ones, `window` in all where that is given."""
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    return (distance >= 0) & (distance < (length if window is None else window))


def attention(q: Array, k: Array, v: Array, sinks: Array, window: int | None) -> Array:
    """Causal attention with sinks of queries `[T, N, H]` to keys and values `[T, K, H]`; returns `[T, N, H]`."""
    T, N, H = q.shape
    group = N // k.shape[1]
    mask = visible(T, window)
    out = np.empty_like(q)
    for head in range(N):
        scores = q[:, head] @ k[:, head // group].T / math.sqrt(H)
        probabilities = softmax_with_sink(np.where(mask, scores, -np.inf), sinks[head])
        out[:, head] = probabilities @ v[:, head // group]
    return out


def softmax_with_sink(scores: Array, sink: float) -> Array:
    """Softmax over the last axis with one more score, the sink, that only counts in the denominator."""
    largest = np.maximum(scores.max(axis=-1, keepdims=True), sink)
    weights = np.exp(scores - largest)
    probabilities: Array = weights / (weights.sum(axis=-1, keepdims=True) + np.exp(sink - largest))
    return probabilities


def route(logits: Array, experts_per_token: int) -> tuple[NDArray[np.int64], Array]:
    """The experts `[T, X]` with the largest router logits and the softmax over those; the lower index wins a tie."""
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :experts_per_token]
    kept = np.take_along_axis(logits, chosen, axis=-1)
    weights = np.exp(kept - kept.max(axis=-1, keepdims=True))
    return chosen, weights / weights.sum(axis=-1, keepdims=True)


def swiglu(gate_up: Array, limit: float, alpha: float = 1.702) -> Array:
    """The activation of an expert: even columns are gates, clamped above only, odd ones ups, clamped on both sides."""
    gate = np.minimum(gate_up[..., 0::2], limit)
    up = np.clip(gate_up[..., 1::2], -limit, limit)
    activation: Array = (up + 1) * gate / (1 + np.exp(-alpha * gate))
    return activation


def mixture_of_experts(config: Config, tensors: dict[str, Array], layer: str, x: Array, router: Array) -> Array:
    """The weighted sum of the outputs of the experts that the router logits `[T, E]` choose, `[T, D]`."""
    chosen, weights = route(router, config.experts_per_token)
    experts = layer + "mlp.experts."
    out = np.zeros_like(x)
    for expert in np.unique(chosen):
        tokens, choice = np.nonzero(chosen == expert)
        gate_up = x[tokens] @ tensors[experts + "gate_up_proj"][expert].T
        gate_up += tensors[experts + "gate_up_proj_bias"][expert]
        activation = swiglu(gate_up, config.swiglu_limit, config.swiglu_alpha)
        y = activation @ tensors[experts + "down_proj"][expert].T + tensors[experts + "down_proj_bias"][expert]
        out[tokens] += weights[tokens, choice, None] * y
    return out
