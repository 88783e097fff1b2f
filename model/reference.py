"""A plain float32 forward on one device, which every other way of computing must equal.

It reads the checkpoint under its Hugging Face names and follows the formulas of the model one after the other, without
caches, chunks, blocks or meshes. Memory grows with the square of the prompt.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from slope_jax.model.checkpoint.safetensors import Checkpoint
from slope_jax.model.config import SLIDING, GptOssConfig
from slope_jax.model.numerics import rms_norm
from slope_jax.model.ops import mxfp4
from slope_jax.model.ops.experts.xla import clamped_swiglu, route
from slope_jax.model.rope import inverse_frequencies, magnitude, rotate

Array = NDArray[np.float32]
Read = Callable[[str], jax.Array]

_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class Forward(NamedTuple):
    """What a forward computes; float32.

    Attributes:
      logits: of the last position, `[V]`.
      kv: for each layer the keys, after RoPE, and values `[T, K, H]` of all tokens.
      margins_LT: by how much the router preferred the last expert that a token chose to the next one.
    """

    logits: Array
    kv: list[tuple[Array, Array]]
    margins_LT: Array


def forward(
    directory: str | os.PathLike[str], token_ids: Sequence[int], swapped: Collection[tuple[int, int]] = ()
) -> Forward:
    """Runs the model on one prompt.

    Args:
      directory: a checkpoint in Hugging Face layout.
      token_ids: the prompt.
      swapped: layers and tokens at which the last expert chosen and the next one change places. Where the router
        prefers neither by more than rounding, that is as right as the other way.
    """
    checkpoint = Checkpoint.open(os.fspath(directory))
    config = checkpoint.config

    def read(name: str) -> jax.Array:
        return jnp.asarray(checkpoint.read(name).astype(np.float32))

    angles = np.outer(np.arange(len(token_ids)), inverse_frequencies(config.rope, config.head_dim))
    scale = magnitude(config.rope)
    cos, sin = (jnp.asarray(scale * f(angles), jnp.float32) for f in (np.cos, np.sin))
    x_TD = jnp.asarray(read("model.embed_tokens.weight")[np.asarray(token_ids)])
    kv, margins = [], []
    for i, kind in enumerate(config.layer_types):
        layer = f"model.layers.{i}."
        t_TD = rms_norm(x_TD, read(layer + "input_layernorm.weight"), config.rms_norm_eps)
        q, k, v = (_project(read, f"{layer}self_attn.{c}_proj", t_TD) for c in "qkv")
        q_TNH, k_TKH, v_TKH = (x.reshape(len(token_ids), -1, config.head_dim) for x in (q, k, v))
        q_TNH, k_TKH = rotate(q_TNH, cos, sin), rotate(k_TKH, cos, sin)
        window = config.sliding_window if kind == SLIDING else len(token_ids)
        heads_TNH = _attention(q_TNH, k_TKH, v_TKH, read(layer + "self_attn.sinks"), window)
        x_TD = x_TD + _project(read, layer + "self_attn.o_proj", heads_TNH.reshape(len(token_ids), -1))
        t_TD = rms_norm(x_TD, read(layer + "post_attention_layernorm.weight"), config.rms_norm_eps)
        logits_TE = _project(read, layer + "mlp.router", t_TD)
        margin_T, other_TE = _swap_experts(logits_TE, config.experts_per_token)
        swapped_T = np.isin(np.arange(len(token_ids)), [token for layer, token in swapped if layer == i])
        logits_TE = jnp.where(swapped_T[:, None], other_TE, logits_TE)
        x_TD = x_TD + _experts(config, checkpoint, read, layer + "mlp.", t_TD, logits_TE)
        kv.append((np.asarray(k_TKH), np.asarray(v_TKH)))
        margins.append(np.asarray(margin_T))
    last_D = rms_norm(x_TD[-1], read("model.norm.weight"), config.rms_norm_eps)
    return Forward(np.asarray(_einsum("VD,D->V", read("lm_head.weight"), last_D)), kv, np.stack(margins))


def _project(read: Read, name: str, x_TD: jax.Array) -> jax.Array:
    return _einsum("TD,FD->TF", x_TD, read(name + ".weight")) + read(name + ".bias")


@functools.partial(jax.jit, static_argnames="window")
def _attention(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, sinks_N: jax.Array, window: int) -> jax.Array:
    """Softmax attention with a sink in the denominator, one query head after the other."""
    tokens, heads, head_dim = q_TNH.shape
    group = heads // k_TKH.shape[1]
    i, j = jnp.arange(tokens)[:, None], jnp.arange(tokens)[None, :]
    mask = (j <= i) & (j > i - window)

    def one_head(head: jax.Array) -> jax.Array:
        scores = _einsum("TH,SH->TS", q_TNH[:, head], k_TKH[:, head // group]) / math.sqrt(head_dim)
        scores = jnp.where(mask, scores, -jnp.inf)
        sink = jnp.broadcast_to(sinks_N[head], (tokens, 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=1), axis=1)[:, :-1]
        return _einsum("TS,SH->TH", weights, v_TKH[:, head // group])

    return jax.lax.map(one_head, jnp.arange(heads)).swapaxes(0, 1)


def _swap_experts(logits_TE: jax.Array, experts_per_token: int) -> tuple[jax.Array, jax.Array]:
    """The margin of the last expert chosen over the next one, and the logits with the two exchanged."""
    top_TX, experts_TX = jax.lax.top_k(logits_TE, experts_per_token + 1)
    token_T = jnp.arange(len(logits_TE))[:, None]
    exchanged_TE = logits_TE.at[token_T, experts_TX[:, -2:]].set(top_TX[:, :-3:-1])
    return top_TX[:, -2] - top_TX[:, -1], exchanged_TE


def _experts(
    config: GptOssConfig, checkpoint: Checkpoint, read: Read, mlp: str, t_TD: jax.Array, logits_TE: jax.Array
) -> jax.Array:
    """Every expert on every token, weighted with zero where the token has not chosen it."""
    routing = route(logits_TE, config.experts_per_token)
    gate_up_bias, down_bias = (read(f"{mlp}experts.{part}_proj_bias") for part in ("gate_up", "down"))
    out_TD = jnp.zeros_like(t_TD)
    for e in range(config.num_experts):
        gate_up, down = (_expert_kernel(checkpoint, f"{mlp}experts.{part}_proj", e) for part in ("gate_up", "down"))
        u_TF = _einsum("TD,DF->TF", t_TD, gate_up) + gate_up_bias[e]
        a_TF = clamped_swiglu(u_TF[:, 0::2], u_TF[:, 1::2], config.swiglu_limit, config.swiglu_alpha)
        y_TD = _einsum("TF,FD->TD", a_TF, down) + down_bias[e]
        weight_T = jnp.sum(jnp.where(routing.experts_TX == e, routing.weights_TX, 0), axis=1)
        out_TD = out_TD + weight_T[:, None] * y_TD
    return out_TD


def _expert_kernel(checkpoint: Checkpoint, name: str, expert: int) -> Array:
    """The kernel of one expert, input first."""
    one = slice(expert, expert + 1)
    if not checkpoint.quantized:
        return checkpoint.read(name, one)[0].astype(np.float32)
    blocks, scales = checkpoint.read(name + "_blocks", one)[0], checkpoint.read(name + "_scales", one)[0]
    return mxfp4.dequantize(blocks, scales, np.float32).T
