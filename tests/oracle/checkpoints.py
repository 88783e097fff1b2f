"""Tiny gpt-oss checkpoints in the Hugging Face layout, written with NumPy only.

The weights of a model depend on its seed and its sizes, not on the form in which they are written: the unquantised
form holds exactly the values that the MXFP4 form decodes to, and every other value is representable in bfloat16.

Random numbers are made from the raw output of PCG64 with integer arithmetic only, because NumPy keeps the raw stream of
a bit generator fixed between releases and makes no such promise for the distributions of `Generator`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pathlib
import zlib
from typing import Any, Literal, Protocol, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

SLIDING, FULL = "sliding_attention", "full_attention"
MXFP4_BLOCK = 32
FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

ExpertForm: TypeAlias = Literal["mxfp4", "bfloat16", "float32"]
Array: TypeAlias = NDArray[Any]
DTYPES: dict[str, np.dtype[Any]] = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """Sizes and weight scales of a tiny gpt-oss model.

    Attributes:
      layer_types: the attention kind of each layer.
      window: keys that a query of a sliding layer sees, itself included.
      rope_original_max: context length before the YaRN extension.
      rope_attention_factor: overrides the YaRN factor on cos and sin when given.
      seed: of all weights.
      qk_scale: standard deviation of the elements of q and k without their biases.
      sink_scale: sinks lie between 3/4 and 5/4 of it, of either sign, so that none is near zero.
      gate_up_bias_scale: wide enough that some gates and ups pass the clamp of the activation.
      gate_up_exponents: first and last scale byte of the MXFP4 blocks of the first expert product.
      down_exponents: the same of the second product.
      logit_scale: standard deviation of the logits.
    """

    layer_types: tuple[str, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 96
    intermediate: int = 64
    num_experts: int = 8
    experts_per_token: int = 2
    window: int = 8
    vocab: int = 211
    rope_theta: float = 100.0
    rope_factor: float = 8.0
    rope_original_max: int = 256
    rope_truncate: bool = False
    rope_attention_factor: float | None = None
    max_position: int = 2048
    swiglu_limit: float = 7.0
    rms_norm_eps: float = 1e-5
    seed: int = 0
    qk_scale: float = 1.3
    sink_scale: float = 4.0
    bias_scale: float = 0.3
    gate_up_bias_scale: float = 2.0
    gate_up_exponents: tuple[int, int] = (120, 124)
    down_exponents: tuple[int, int] = (117, 121)
    logit_scale: float = 2.0

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate"):
            if getattr(self, name) % MXFP4_BLOCK:
                raise ValueError(f"{name} {getattr(self, name)} is not a multiple of the MXFP4 block {MXFP4_BLOCK}")

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return len(self.layer_types)


def _kinds(letters: str) -> tuple[str, ...]:
    return tuple(SLIDING if letter == "S" else FULL for letter in letters)


TOY = TinyModel(layer_types=_kinds("SFSFSF"), seed=1)
TOY_IRREGULAR = TinyModel(layer_types=_kinds("SSFSFFS"), seed=2)
TOY8 = TinyModel(layer_types=_kinds("SFSFSFSF"), seed=3)
WIDE = TinyModel(
    layer_types=_kinds("SFF"), num_heads=16, num_kv_heads=4, head_dim=24, hidden=128, intermediate=160, num_experts=12,
    experts_per_token=3, window=5, vocab=307, rope_theta=500.0, rope_factor=4.0, rope_original_max=512,
    rope_truncate=True, swiglu_limit=6.0, seed=4,
)  # fmt: skip
GOLDEN128 = TinyModel(layer_types=_kinds("SFSF"), window=128, seed=5)
PRESETS = {"toy": TOY, "toy_irregular": TOY_IRREGULAR, "toy8": TOY8, "wide": WIDE, "golden128": GOLDEN128}


class WriteCheckpoint(Protocol):
    """The type of the fixture `checkpoint`."""

    def __call__(self, model: TinyModel, **options: Any) -> pathlib.Path:
        """Writes a checkpoint once per session and set of arguments; tests must not change its files."""
        ...


def write_checkpoint(
    model: TinyModel,
    directory: str | pathlib.Path,
    *,
    experts: ExpertForm = "mxfp4",
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    num_files: int = 3,
    rope_spelling: Literal["rope_scaling", "rope_parameters"] = "rope_scaling",
    quantization_config: bool | None = None,
) -> pathlib.Path:
    """Writes config.json, generation_config.json, safetensors files and their index; returns the directory.

    Args:
      model: what to write.
      directory: created if needed.
      experts: the form of the two expert products.
      dtype: the type of all other tensors.
      num_files: files over which the tensors are spread. Several are numbered from zero with the last number, one less
        than their count, as the total, as in the published checkpoints; one is called model.safetensors.
      rope_spelling: which of the two spellings of the rope settings config.json has.
      quantization_config: whether config.json has that entry; by default when the experts are in MXFP4.
    """
    path = pathlib.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    quantized = experts == "mxfp4" if quantization_config is None else quantization_config
    _write_json(path / "config.json", config_dict(model, rope_spelling=rope_spelling, quantization_config=quantized))
    eos = _special_tokens(model)
    generation = {"bos_token_id": eos["bos"], "do_sample": True, "eos_token_id": [eos["eos"], eos["pad"], eos["call"]]}
    _write_json(path / "generation_config.json", {**generation, "pad_token_id": eos["pad"]})
    tensors = model_tensors(model, experts=experts, dtype=dtype)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(_split(tensors, num_files)):
        file = "model.safetensors" if num_files == 1 else f"model-{i:05d}-of-{num_files - 1:05d}.safetensors"
        save_file({name: tensors[name] for name in names}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index)
    return path


def config_dict(
    model: TinyModel, *, rope_spelling: str = "rope_scaling", quantization_config: bool = True
) -> dict[str, Any]:
    """The content of config.json, with every field of the published files."""
    special = _special_tokens(model)
    config: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": special["eos"],
        "experts_per_token": model.experts_per_token,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initial_context_length": model.rope_original_max,
        "initializer_range": 0.02,
        "intermediate_size": model.intermediate,
        "layer_types": list(model.layer_types),
        "max_position_embeddings": model.max_position,
        "model_type": "gpt_oss",
        "num_attention_heads": model.num_heads,
        "num_experts_per_tok": model.experts_per_token,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads,
        "num_local_experts": model.num_experts,
        "output_router_logits": False,
        "pad_token_id": special["pad"],
        "rms_norm_eps": model.rms_norm_eps,
        "router_aux_loss_coef": 0.9,
        "sliding_window": model.window,
        "swiglu_limit": model.swiglu_limit,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": model.vocab,
    }
    rope = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": model.rope_factor,
        "original_max_position_embeddings": model.rope_original_max,
        "rope_type": "yarn",
        "truncate": model.rope_truncate,
    }
    if model.rope_attention_factor is not None:
        rope["attention_factor"] = model.rope_attention_factor
    if rope_spelling == "rope_scaling":
        config |= {"rope_scaling": rope, "rope_theta": model.rope_theta}
    elif rope_spelling == "rope_parameters":
        config |= {"rope_parameters": {**rope, "rope_theta": model.rope_theta}, "swiglu_alpha": 1.702}
    else:
        raise ValueError(f"unknown rope spelling {rope_spelling!r}")
    if quantization_config:
        unconverted = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
        config["quantization_config"] = {"modules_to_not_convert": unconverted, "quant_method": "mxfp4"}
    return config


def model_tensors(model: TinyModel, *, experts: ExpertForm = "mxfp4", dtype: str = "bfloat16") -> dict[str, Array]:
    """All tensors of a checkpoint by their Hugging Face names, in layer order."""
    D, H, N, K, E = model.hidden, model.head_dim, model.num_heads, model.num_kv_heads, model.num_experts
    source = _Source(model.seed)
    tensors = {"model.embed_tokens.weight": source.normal("model.embed_tokens.weight", (model.vocab, D), 1.0)}

    def linear(name: str, rows: int, columns: int, scale: float, bias_scale: float = model.bias_scale) -> None:
        weight, bias = f"{name}.weight", f"{name}.bias"
        tensors[weight] = source.normal(weight, (rows, columns), scale / math.sqrt(columns))
        tensors[bias] = source.normal(bias, (rows,), bias_scale)

    def norm(name: str) -> None:
        tensors[name] = 1 + source.normal(name, (D,), 0.2)

    for i in range(model.num_layers):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm.weight")
        linear(f"{layer}.self_attn.q_proj", N * H, D, model.qk_scale)
        linear(f"{layer}.self_attn.k_proj", K * H, D, model.qk_scale)
        linear(f"{layer}.self_attn.v_proj", K * H, D, 1.0)
        linear(f"{layer}.self_attn.o_proj", D, N * H, 1.0)
        sinks = f"{layer}.self_attn.sinks"
        size = 0.75 + 0.5 * source.uniform(f"{sinks}.size", (N,))
        sign = np.where(source.uniform(f"{sinks}.sign", (N,)) < 0.5, -1, 1)
        tensors[sinks] = (model.sink_scale * size * sign).astype(np.float32)
        norm(f"{layer}.post_attention_layernorm.weight")
        linear(f"{layer}.mlp.router", E, D, 1.0, bias_scale=0.5)
        products = {
            "gate_up_proj": (2 * model.intermediate, D, model.gate_up_exponents, model.gate_up_bias_scale),
            "down_proj": (D, model.intermediate, model.down_exponents, model.bias_scale),
        }
        for product, (rows, columns, exponents, bias_scale) in products.items():
            name = f"{layer}.mlp.experts.{product}"
            blocks = source.integers(f"{name}_blocks", (E, rows, columns // MXFP4_BLOCK, MXFP4_BLOCK // 2), (0, 255))
            scales = source.integers(f"{name}_scales", (E, rows, columns // MXFP4_BLOCK), exponents)
            if experts == "mxfp4":
                tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            else:
                values = _mxfp4_values(blocks, scales)
                tensors[name] = np.ascontiguousarray(values.swapaxes(1, 2)).astype(DTYPES[experts])
            tensors[f"{name}_bias"] = source.normal(f"{name}_bias", (E, rows), bias_scale)
    norm("model.norm.weight")
    tensors["lm_head.weight"] = source.normal("lm_head.weight", (model.vocab, D), model.logit_scale / math.sqrt(D))
    return {name: _stored(name, tensor, dtype) for name, tensor in tensors.items()}


def tensors_digest(model: TinyModel) -> str:
    """SHA-256 over the names, shapes and bytes of a model's tensors, in the form with bfloat16 and MXFP4."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model_tensors(model).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def random_prompt(model: TinyModel, length: int, seed: int = 0) -> list[int]:
    """A prompt of uniformly drawn token ids, the same for the same model sizes, length and seed."""
    ids = _Source(seed).integers(f"prompt {length}", (length,), (0, model.vocab - 1), np.int64)
    return [int(i) for i in ids]


class _Source:
    """Random tensors, each from a stream of its own that its name selects."""

    def __init__(self, seed: int):
        self._seed = seed

    def _raw(self, name: str, count: int) -> NDArray[np.uint64]:
        return np.random.PCG64([self._seed, zlib.crc32(name.encode())]).random_raw(count)

    def normal(self, name: str, shape: tuple[int, ...], scale: float) -> Array:
        """Nearly normal values: the sum of four uniform ones, which needs no function of the platform's library."""
        parts = self._raw(name, math.prod(shape)).view(np.uint16).reshape(-1, 4)
        centred: Array = parts.sum(axis=1, dtype=np.int64) - 2 * 0xFFFF
        return (centred * (scale * math.sqrt(3) / 0x10000)).reshape(shape).astype(np.float32)

    def uniform(self, name: str, shape: tuple[int, ...]) -> Array:
        """Uniform values in [0, 1)."""
        values: Array = (self._raw(name, math.prod(shape)) >> np.uint64(11)) * 2.0**-53
        return values.reshape(shape)

    def integers(self, name: str, shape: tuple[int, ...], bounds: tuple[int, int], dtype: type = np.uint8) -> Array:
        """Integers between bounds that are both included; the span is far below 2**64, so the remainder is uniform."""
        low, high = bounds
        offset: Array = (self._raw(name, math.prod(shape)) % np.uint64(high - low + 1)).reshape(shape)
        return (offset + np.uint64(low)).astype(dtype)


def _mxfp4_values(blocks: Array, scales: Array) -> Array:
    """Float32 `[E, out, in]` of packed experts."""
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, MXFP4_BLOCK)
    values = np.ldexp(FP4_VALUES[nibbles], scales[..., None].astype(np.int32) - 127)
    return values.reshape(*scales.shape[:-1], -1)


def _stored(name: str, tensor: Array, dtype: str) -> Array:
    """The tensor in the type of the file; all but the expert products are rounded to bfloat16 first."""
    if name.endswith(("_blocks", "_scales", "gate_up_proj", "down_proj")):
        return tensor
    return tensor.astype(DTYPES["bfloat16"]).astype(DTYPES[dtype])


def _split(tensors: dict[str, Array], num_files: int) -> list[list[str]]:
    """Names in order, cut into `num_files` runs of about equal size, so that layers straddle files."""
    total = sum(t.nbytes for t in tensors.values())
    files: list[list[str]] = [[] for _ in range(num_files)]
    done = 0
    for name, tensor in tensors.items():
        files[min(num_files - 1, done * num_files // total)].append(name)
        done += tensor.nbytes
    return files


def _special_tokens(model: TinyModel) -> dict[str, int]:
    return {"bos": model.vocab - 5, "pad": model.vocab - 4, "eos": model.vocab - 3, "call": model.vocab - 2}


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
