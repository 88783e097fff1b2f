"""gpt-oss as Hugging Face transformers runs it: prefill, and greedy decoding from a given KV cache.

Needs the packages of requirements-oracle.txt.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, GptOssForCausalLM

torch.set_num_threads(1)  # tiny products gain nothing from more, and idle threads that spin hold up those of JAX

KvLayer: TypeAlias = tuple[int, NDArray[Any], NDArray[Any]]  # position of the first token, k and v [tokens, K, H]


def load(directory: str | pathlib.Path, dtype: str = "float32") -> GptOssForCausalLM:
    """Loads a checkpoint with unquantised experts, with the plain implementations of attention and experts."""
    model, report = GptOssForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    problems = {kind: names for kind, names in report.items() if names}
    if problems:
        raise ValueError(f"transformers did not load {directory} completely: {problems}")
    return model.eval()


def prefill(model: GptOssForCausalLM, token_ids: Sequence[int]) -> tuple[NDArray[np.float32], list[KvLayer]]:
    """Runs a prompt; returns the logits `[V]` of its last position and the KV of all its tokens in every layer."""
    cache = DynamicCache()  # without a configuration it also keeps what sliding layers no longer need
    logits = _step(model, token_ids, cache)
    kv = [(0, _by_token(layer.keys), _by_token(layer.values)) for layer in cache.layers]
    return logits.float().numpy(), kv


def greedy(model: GptOssForCausalLM, token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens that transformers appends to a prompt that it prefills itself."""
    cache = DynamicCache(config=model.config)
    first = int(_step(model, token_ids, cache).argmax())
    return _decode(model, cache, first, num_tokens)


def greedy_from_kv(
    model: GptOssForCausalLM, kv: Sequence[KvLayer], num_prompt_tokens: int, first_token: int, num_tokens: int
) -> list[int]:
    """The tokens that transformers appends, the first one given, when it continues from a handed-over KV cache."""
    cache = DynamicCache(config=model.config)
    for layer, (start, k, v) in zip(cache.layers, kv, strict=True):
        if start + len(k) != num_prompt_tokens:
            raise ValueError(f"KV of tokens {start} to {start + len(k)} does not end with token {num_prompt_tokens}")
        layer.update(_by_head(k), _by_head(v))
        if layer.is_sliding:
            # It stores the last window - 1 tokens and counts all tokens since position 0.
            layer.cumulative_length = num_prompt_tokens
        elif start:
            raise ValueError(f"KV of a full-attention layer starts at token {start}")
    return _decode(model, cache, first_token, num_tokens)


def _decode(model: GptOssForCausalLM, cache: DynamicCache, first_token: int, num_tokens: int) -> list[int]:
    tokens = [first_token]
    while len(tokens) < num_tokens:
        tokens.append(int(_step(model, tokens[-1:], cache).argmax()))
    return tokens


def _step(model: GptOssForCausalLM, token_ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
    """Feeds tokens at the positions that follow the cache; returns the logits `[V]` of the last one."""
    with torch.no_grad():
        output = model(input_ids=torch.tensor([list(token_ids)]), cache=cache, use_cache=True, logits_to_keep=1)
    return output.logits[0, -1]


def _by_token(heads: torch.Tensor) -> NDArray[np.float32]:
    """`[1, K, tokens, H]` to `[tokens, K, H]`."""
    return heads[0].transpose(0, 1).float().numpy()


def _by_head(array: NDArray[Any]) -> torch.Tensor:
    """`[tokens, K, H]` to `[1, K, tokens, H]`."""
    return torch.from_numpy(np.array(array, np.float32)).transpose(0, 1)[None]
