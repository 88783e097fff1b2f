"""The sizes of any dense or mixture-of-experts model with grouped-query attention, for the planner alone.

The engine runs gpt-oss only, and refuses other models. What the planner has to know of one are sizes, which it takes
from a Hugging Face config.json. A dense model is one with a single expert, to which every token is sent.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from slope_jax.execution.spec import EXPERT_WEIGHTS
from slope_jax.model.config import FULL, SLIDING, GptOssConfig, RopeConfig, read_json
from slope_jax.model.published import PUBLISHED, find_config

_NO_WINDOW = 128  # of a model without window layers, where it has no influence
# Which would need counts of their own.
_REFUSED = ("kv_lora_rank", "n_shared_experts", "shared_expert_intermediate_size", "first_k_dense_replace",
            "mlp_only_layers", "linear_num_value_heads", "moe_layer_frequency", "moe_layer_freq")  # fmt: skip
# Steps at which layers with experts are found among the others; 1 where all have them.
_STEPS = ("decoder_sparse_step", "interleave_moe_layer_step")
_ALL_WINDOW = ("mistral", "mixtral", "phi3", "starcoder2")  # where all layers have the window, if there is one
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
      name: as it was asked for.
      config: its sizes.
      is_packed: whether its experts are in MXFP4.
    """

    name: str
    config: GptOssConfig
    is_packed: bool

    @property
    def expert_weights(self) -> tuple[str, ...]:
        """The formats that its experts can have on the devices."""
        return EXPERT_WEIGHTS if self.is_packed else ("bfloat16",)


def read_model(name: str | os.PathLike[str]) -> PlannedModel:
    """A published gpt-oss model by its name, or the sizes in a checkpoint folder or a config.json of any model.

    Raises:
      ValueError: there is neither, or the model has parts that the planner has no counts for; the message names them.
    """
    path = pathlib.Path(name)
    file = path / "config.json" if path.is_dir() else path
    if name in PUBLISHED or not file.is_file():
        return PlannedModel(name=os.fspath(name), config=find_config(name), is_packed=True)
    raw = read_json(file)
    if raw.get("model_type") == "gpt_oss":
        return PlannedModel(name=os.fspath(name), config=find_config(name), is_packed="quantization_config" in raw)
    try:
        return PlannedModel(name=os.fspath(name), config=sizes_of(raw), is_packed=False)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def sizes_of(raw: Mapping[str, Any]) -> GptOssConfig:
    """The sizes in the content of a config.json that is not of gpt-oss.

    Raises:
      ValueError: a size is missing or out of range, or the model has parts that the planner has no counts for.
    """
    raw = raw.get("text_config", raw)
    unknown = [key for key in _REFUSED if raw.get(key)]
    unknown += [key for key in _STEPS if raw.get(key, 1) != 1]
    if unknown:
        raise ValueError(f"there are no counts for a model with {', '.join(unknown)}")
    experts = next((_size(raw, key) for key in _EXPERTS if raw.get(key)), 1)
    heads, width = _size(raw, "num_attention_heads"), _size(raw, "hidden_size")
    inner = "moe_intermediate_size" if raw.get("moe_intermediate_size") else "intermediate_size"
    layers = _size(raw, "num_hidden_layers")
    window = _size(raw, "sliding_window", _NO_WINDOW) if _has_window(raw) else None
    kinds = raw.get("layer_types") or _layer_types(raw, layers)
    if not isinstance(kinds, list) or set(kinds) - {SLIDING, FULL}:
        raise ValueError(f"layer_types must list {SLIDING} and {FULL}, not {kinds!r}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")
    return GptOssConfig(
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=width,
        intermediate_size=_size(raw, inner),
        num_heads=heads,
        num_kv_heads=_size(raw, "num_key_value_heads", heads),
        head_dim=_size(raw, "head_dim", width // heads),
        num_experts=experts,
        experts_per_token=_size(raw, "num_experts_per_tok") if experts > 1 else 1,
        sliding_window=window or _NO_WINDOW,
        layer_types=tuple(kinds),
        max_position=_size(raw, "max_position_embeddings"),
        # What follows has no influence on the counts.
        rms_norm_eps=1e-5,
        swiglu_limit=1.0,
        rope=RopeConfig(theta=1e4, factor=1.0, original_max_position=4096),
    )


def _layer_types(raw: Mapping[str, Any], layers: int) -> list[str]:
    """Which layers have a window, of a model that does not list them."""
    if not _has_window(raw):
        return [FULL] * layers
    if raw.get("sliding_window_pattern") is not None:  # every so many layers, one has none
        pattern = _size(raw, "sliding_window_pattern")
        return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(layers)]
    if raw.get("model_type") not in _ALL_WINDOW:
        raise ValueError(f"which layers have the sliding_window of {raw['sliding_window']}? layer_types does not say")
    return [SLIDING] * layers


def _has_window(raw: Mapping[str, Any]) -> bool:
    return raw.get("sliding_window") is not None and bool(raw.get("use_sliding_window", True))


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if raw.get(key) is None else raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    return value
