"""The hyperparameters of a gpt-oss model and how they are read from `config.json`.

A key of config.json is either a hyperparameter, or required to have the one value that the forward pass implements, or
known to have no influence on it. Any other key is refused, so that no setting is dropped in silence.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
MXFP4 = "mxfp4"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """YaRN rotary embedding settings (arXiv 2309.00071).

    Attributes:
      theta: base of the frequencies.
      factor: by how much the context is longer than the original one.
      original_max_position: tokens of the original context.
      beta_fast: rotations over the original context from which frequencies are kept.
      beta_slow: rotations over the original context up to which frequencies are divided by `factor`.
      truncate: whether the bounds of the ramp between the two are rounded to whole dimensions.
      attention_factor: multiplies cos and sin in place of `0.1 ln(factor) + 1` when given.

    Raises:
      ValueError: a value is out of its range.
    """

    theta: float
    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _require_positive_integers(self, ("original_max_position",))
        _require_finite_floats(self, ("theta", "factor", "beta_fast", "beta_slow"))
        if self.attention_factor is not None:
            _require_finite_floats(self, ("attention_factor",))
            _require(self.attention_factor > 0, f"attention_factor must be positive, not {self.attention_factor}")
        _require(self.theta > 1, f"rope theta must be greater than 1, not {self.theta}")
        _require(self.factor >= 1, f"rope factor must be at least 1, not {self.factor}")
        _require(
            0 < self.beta_slow < self.beta_fast,
            f"rope needs 0 < beta_slow < beta_fast, not beta_slow={self.beta_slow}, beta_fast={self.beta_fast}",
        )
        _require(isinstance(self.truncate, bool), f"rope truncate must be true or false, not {self.truncate!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig:
    """Hyperparameters of one gpt-oss model.

    Attributes:
      vocab_size: rows of the embedding and of the unembedding.
      hidden_size: width of the residual stream.
      intermediate_size: width of an expert.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides `num_heads`.
      head_dim: width of a head, even.
      num_experts: experts of each layer.
      experts_per_token: experts that a token is sent to.
      sliding_window: keys that a query of a sliding layer sees, itself included.
      layer_types: the attention kind of each layer, `SLIDING` or `FULL`.
      max_position: the longest sequence, in tokens.
      rms_norm_eps: added to the mean square in RMSNorm.
      swiglu_limit: clamp of gate (above) and up (both sides).
      rope: rotary embedding settings.
      swiglu_alpha: gain inside the sigmoid of the expert activation.
      eos_token_ids: tokens that end a generation; not used by the forward pass.

    Raises:
      ValueError: a value is out of its range, or two of them clash.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    sliding_window: int
    layer_types: tuple[str, ...]
    max_position: int
    rms_norm_eps: float
    swiglu_limit: float
    rope: RopeConfig
    swiglu_alpha: float = 1.702
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_positive_integers(self, _SIZES.values())
        _require_finite_floats(self, ("rms_norm_eps", "swiglu_limit", "swiglu_alpha"))
        for name in ("rms_norm_eps", "swiglu_limit"):
            _require(getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} query heads cannot be divided among {self.num_kv_heads} KV heads",
        )
        _require(self.head_dim % 2 == 0, f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        _require(
            self.experts_per_token <= self.num_experts,
            f"{self.experts_per_token} experts per token are more than the {self.num_experts} experts",
        )
        _require(len(self.layer_types) > 0, "layer_types is empty: the model needs at least one layer")
        for layer, kind in enumerate(self.layer_types):
            _require(kind in (SLIDING, FULL), f"layer_types[{layer}] is {kind!r}; supported: {SLIDING}, {FULL}")
        for token in self.eos_token_ids:
            _require(
                _is_integer(token) and 0 <= token < self.vocab_size,
                f"eos_token_id {token!r} is not one of the {self.vocab_size} tokens",
            )

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return len(self.layer_types)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the hyperparameters that the forward pass depends on, so not of `eos_token_ids`."""
        values = dataclasses.asdict(self)
        del values["eos_token_ids"]
        return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> GptOssConfig:
        """Reads the content of a Hugging Face config.json, with either spelling of the rope settings.

        Raises:
          ValueError: a setting is missing, unknown, contradictory or not supported; the message names it.
        """
        _check_fixed(raw)
        quantization_method(raw)
        known = {*_SIZES, *_FLOATS, *_ALIASES, *_FIXED, *_HARMLESS, *_ELSEWHERE}
        unknown = sorted(set(raw) - known)
        _require(not unknown, f"config.json has settings that are not supported: {', '.join(unknown)}")
        values: dict[str, Any] = {field: _integer(raw, _spelled(raw, key), key) for key, field in _SIZES.items()}
        for key, (field, default) in _FLOATS.items():
            values[field] = _number(raw.get(key, default), key)
        rope = _read_rope(raw)
        original = raw.get("initial_context_length")
        _require(
            original is None or original == rope.original_max_position,
            f"initial_context_length {original!r} contradicts original_max_position_embeddings "
            f"{rope.original_max_position}",
        )
        eos = raw.get("eos_token_id")
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        return cls(**values, layer_types=_read_layer_types(raw), rope=rope, eos_token_ids=eos_ids)


def load_config(directory: str | os.PathLike[str]) -> GptOssConfig:
    """Reads `config.json` of a checkpoint; the end tokens of `generation_config.json` are preferred where it has them.

    Raises:
      ValueError: a file is missing or not JSON, or `GptOssConfig.from_json` refuses it; the message names the file.
    """
    directory = pathlib.Path(directory)
    raw = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        raw = raw if eos is None else {**raw, "eos_token_id": eos}
    try:
        return GptOssConfig.from_json(raw)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: the file is missing, is not JSON, repeats a key, or holds something other than an object.
    """
    try:
        content = json.loads(path.read_bytes(), object_pairs_hook=_unique_keys)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    _require(isinstance(content, dict), f"{path}: holds {type(content).__name__}, not a JSON object")
    return dict(content)


def quantization_method(raw: Mapping[str, Any]) -> str | None:
    """The method that `quantization_config` of a config.json names: `MXFP4`, or None when there is none.

    Raises:
      ValueError: another method, or a setting of the method that is not known.
    """
    quantization = raw.get("quantization_config")
    if quantization is None:
        return None
    _require(isinstance(quantization, Mapping), f"quantization_config must be an object, not {quantization!r}")
    method = quantization.get("quant_method")
    _require(method == MXFP4, f"quantization_config.quant_method {method!r} is not supported, only {MXFP4!r}")
    unknown = sorted(set(quantization) - {"quant_method", "modules_to_not_convert", "dequantize"})
    _require(not unknown, f"quantization_config has settings that are not supported: {', '.join(unknown)}")
    return MXFP4


# Keys of config.json and the fields that they set.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
    "sliding_window": "sliding_window",
    "max_position_embeddings": "max_position",
}
_FLOATS: dict[str, tuple[str, float | None]] = {
    "rms_norm_eps": ("rms_norm_eps", None),
    "swiglu_limit": ("swiglu_limit", 7.0),
    "swiglu_alpha": ("swiglu_alpha", 1.702),
}
_ALIASES = {"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"}
_ELSEWHERE = ("num_hidden_layers", "layer_types", "rope_theta", "rope_scaling", "rope_parameters", "eos_token_id",
              "initial_context_length", "quantization_config")  # fmt: skip

# What the forward pass implements; an absent key stands for the first value.
_FIXED: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt_oss",),
    "architectures": (["GptOssForCausalLM"], None),
    "hidden_act": ("silu",),
    "attention_bias": (True,),
    "attention_dropout": (0, None),
    "tie_word_embeddings": (False,),
    "dtype": (None, "bfloat16", "float32"),
    "torch_dtype": (None, "bfloat16", "float32"),
    "is_encoder_decoder": (False, None),
    "tie_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "per_layer_config": (None, {}),
    "auto_map": (None,),
    "use_bfloat16": (False, None),
}

# Keys that transformers 4.55 to 5 write and that do not change the forward pass: training, generation, bookkeeping.
_HARMLESS = frozenset((
    "initializer_range", "router_aux_loss_coef", "output_router_logits", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "torchscript", "chunk_size_feed_forward", "max_seq_len_cached",
    "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "is_decoder", "tokenizer_class",
    "prefix", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
    "tf_legacy_loss", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "_attn_implementation",
    "_attn_implementation_autoset", "_attn_implementation_internal", "_experts_implementation_internal",
    "unsloth_fixed", "unsloth_version", "max_length", "min_length", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
))  # fmt: skip

_ROPE_KEYS = frozenset(
    ("rope_type", "type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
     "attention_factor", "rope_theta")
)  # fmt: skip


def _check_fixed(raw: Mapping[str, Any]) -> None:
    for key, supported in _FIXED.items():
        value = raw.get(key, supported[0])
        # Booleans equal 0 and 1 in Python, so the type of a boolean setting is compared too.
        fits = any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in supported)
        names = ", ".join(json.dumps(choice) for choice in supported)
        _require(fits, f"{key} {json.dumps(value)} is not supported; supported: {names}")
    _require("model_type" in raw, "model_type is missing; supported: gpt_oss")


def _read_rope(raw: Mapping[str, Any]) -> RopeConfig:
    spellings = [key for key in ("rope_scaling", "rope_parameters") if raw.get(key) is not None]
    _require(len(spellings) > 0, "rope_scaling (or rope_parameters) is missing: only rope type yarn is supported")
    tables = [_rope_table(raw, key) for key in spellings]
    rope = tables[0]
    for other in tables[1:]:
        shared = rope.keys() & other.keys()
        clash = sorted(k for k in shared if rope[k] != other[k])
        _require(not clash, f"rope_scaling and rope_parameters contradict each other in {', '.join(clash)}")
        rope = {**other, **rope}
    for key in ("rope_theta", "factor", "original_max_position_embeddings"):
        _require(key in rope, f"{key} is missing from the rope settings")
    optional = {key: rope[key] for key in ("beta_fast", "beta_slow", "attention_factor") if key in rope}
    return RopeConfig(
        theta=_number(rope["rope_theta"], "rope_theta"),
        factor=_number(rope["factor"], "rope factor"),
        original_max_position=rope["original_max_position_embeddings"],
        truncate=rope.get("truncate", True),
        **{key: _number(value, f"rope {key}") for key, value in optional.items()},
    )


def _rope_table(raw: Mapping[str, Any], spelling: str) -> dict[str, Any]:
    """One spelling of the rope settings without its null entries, with the base that stands beside or inside it."""
    _require(isinstance(raw[spelling], Mapping), f"{spelling} must be an object, not {raw[spelling]!r}")
    table = {k: v for k, v in raw[spelling].items() if v is not None and (k, v) != ("partial_rotary_factor", 1)}
    unknown = sorted(set(table) - _ROPE_KEYS)
    _require(not unknown, f"{spelling} has settings that are not supported: {', '.join(unknown)}")
    kinds = {table[key] for key in ("rope_type", "type") if isinstance(table.get(key), str)}
    _require(kinds == {"yarn"}, f"{spelling}: rope type {sorted(kinds)} is not supported, only yarn")
    theta = raw.get("rope_theta")
    _require(
        theta is None or table.get("rope_theta", theta) == theta,
        f"rope_theta {theta!r} contradicts rope_theta {table.get('rope_theta')!r} of {spelling}",
    )
    return table if theta is None else {**table, "rope_theta": theta}


def _read_layer_types(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of each layer; alternating from a sliding layer on, as transformers has it, when there is no list."""
    num_layers = _integer(raw, "num_hidden_layers", "num_hidden_layers")
    kinds = raw.get("layer_types")
    if kinds is None:
        return tuple((SLIDING, FULL)[layer % 2] for layer in range(num_layers))
    _require(isinstance(kinds, list), f"layer_types must be a list, not {kinds!r}")
    _require(len(kinds) == num_layers, f"layer_types has {len(kinds)} entries, but num_hidden_layers is {num_layers}")
    return tuple(kinds)


def _spelled(raw: Mapping[str, Any], key: str) -> str:
    """The spelling under which `raw` has a key, after a check that its spellings agree."""
    spellings = [key, *(alias for alias, target in _ALIASES.items() if target == key)]
    present = [spelling for spelling in spellings if raw.get(spelling) is not None]
    values = [raw[spelling] for spelling in present]
    _require(
        all(value == values[0] for value in values),
        "contradiction: " + " but ".join(f"{k} is {raw[k]!r}" for k in present),
    )
    return present[0] if present else key


def _integer(raw: Mapping[str, Any], spelling: str, key: str) -> int:
    value = raw.get(spelling)
    _require(value is not None, f"{key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{spelling} must be a positive integer, not {value!r}")
    return value


def _number(value: Any, key: str) -> float:
    _require(value is not None, f"{key} is missing")
    _require(isinstance(value, int | float) and not isinstance(value, bool), f"{key} must be a number, not {value!r}")
    return float(value)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_positive_integers(config: Any, names: Collection[str]) -> None:
    for name in names:
        value = getattr(config, name)
        _require(_is_integer(value) and value > 0, f"{name} must be a positive integer, not {value!r}")


def _require_finite_floats(config: Any, names: Collection[str]) -> None:
    """Checks numbers and makes them floats, so that equal settings have equal fingerprints."""
    for name in names:
        value = _number(getattr(config, name), name)
        _require(math.isfinite(value), f"{name} must be finite, not {value}")
        object.__setattr__(config, name, value)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        repeated = sorted({key for key, _ in pairs if sum(k == key for k, _ in pairs) > 1})
        raise ValueError(f"repeated keys: {', '.join(repeated)}")
    return table
