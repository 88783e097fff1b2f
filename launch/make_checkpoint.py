"""Writes a gpt-oss checkpoint with random weights, in the published layout, for demonstrations and measurements.

    python -m slope_jax.launch.make_checkpoint --output=runs/demo --preset=demo

The folder holds config.json, generation_config.json, several safetensors files with an index, experts in MXFP4, and a
byte-level BPE tokenizer.json trained on the project's own files. The weights are drawn so that activations keep a size
of about 1 and logits of about 5.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
import pathlib
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from absl import app, flags
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

import slope_jax
from slope_jax.launch.random_weights import draw_rows
from slope_jax.model.checkpoint.safetensors_writer import SafetensorsWriter
from slope_jax.model.config import FULL, SLIDING, GptOssConfig
from slope_jax.model.published import published_config

SPECIAL_TOKENS = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
_ROWS_BYTES = 64 * 2**20  # random numbers held at once, as float32
_BF16, _U8 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.uint8)

Tensors = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Sizes of a model; everything else is as published."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    vocab_size: int
    window: int

    def config(self) -> GptOssConfig:
        """The hyperparameters of a model of these sizes, without tokens that end a generation."""
        return dataclasses.replace(
            published_config("gpt-oss-20b"),
            layer_types=tuple((SLIDING, FULL)[i % 2] for i in range(self.num_layers)),
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            vocab_size=self.vocab_size,
            sliding_window=self.window,
            eos_token_ids=(),
        )


PRESETS = {
    "mini": Preset(
        num_layers=8,
        hidden_size=512,
        intermediate_size=512,
        num_heads=16,
        num_kv_heads=2,
        head_dim=64,
        num_experts=32,
        experts_per_token=4,
        vocab_size=8192,
        window=128,
    ),
    "demo": Preset(
        num_layers=8,
        hidden_size=256,
        intermediate_size=192,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        num_experts=16,
        experts_per_token=4,
        vocab_size=4096,
        window=128,
    ),
    "tiny": Preset(
        num_layers=4,
        hidden_size=64,
        intermediate_size=96,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        num_experts=6,
        experts_per_token=2,
        vocab_size=512,
        window=16,
    ),
}


def make_checkpoint(
    output: str | os.PathLike[str],
    preset: Preset,
    *,
    seed: int = 0,
    num_files: int = 3,
    train_on: Sequence[pathlib.Path] | None = None,
) -> pathlib.Path:
    """Writes a checkpoint; the folder takes its name when it is complete.

    Args:
      output: the folder to make.
      preset: sizes of the model.
      seed: seed of the weights.
      num_files: safetensors files, at most one per layer and two.
      train_on: files to train the tokenizer on; those of the project by default.

    Returns:
      The folder.

    Raises:
      ValueError: the folder exists, or a number does not fit the others.
    """
    folder = pathlib.Path(output)
    if folder.exists():
        raise ValueError(f"{folder} exists; choose another folder or remove it")
    if not 1 <= num_files <= preset.num_layers + 2:
        raise ValueError(f"num_files must be in 1..{preset.num_layers + 2} for this preset, not {num_files}")
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        tokenizer = train_tokenizer(train_on or project_files(), preset.vocab_size)
        tokenizer.save(str(part / "tokenizer.json"))
        _write_json(part / "config.json", config_fields(preset, tokenizer))
        _write_json(part / "generation_config.json", _generation_fields(tokenizer))
        _write_weights(part, preset, seed, num_files)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part)
        raise
    return folder


def project_files() -> list[pathlib.Path]:
    """The Python and Markdown files of the project (of the installed package outside a checkout), in a fixed order."""
    package = pathlib.Path(slope_jax.__file__).parent
    files = {path.resolve() for part in (".", "model", "mesh", "launch") for path in (package / part).glob("*.py")}
    checkout = package.parent
    if (checkout / "pyproject.toml").exists():
        files |= {path for pattern in ("*.md", "tests/**/*.py") for path in checkout.glob(pattern)}
    return sorted(path for path in files if path.stat().st_size)


def train_tokenizer(files: Sequence[pathlib.Path], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer with at most `vocab_size` ids, the special tokens of the harmony format the last."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(SPECIAL_TOKENS):
        raise ValueError(
            f"vocab_size must be at least {len(alphabet) + len(SPECIAL_TOKENS)} (bytes and special tokens), "
            f"not {vocab_size}"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator((path.read_text(encoding="utf-8") for path in files), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def config_fields(preset: Preset, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """The fields of config.json, as in the published files."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": tokenizer.token_to_id("<|return|>"),
        "experts_per_token": preset.experts_per_token,
        "head_dim": preset.head_dim,
        "hidden_act": "silu",
        "hidden_size": preset.hidden_size,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": preset.intermediate_size,
        "layer_types": [(SLIDING, FULL)[i % 2] for i in range(preset.num_layers)],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": preset.num_heads,
        "num_experts_per_tok": preset.experts_per_token,
        "num_hidden_layers": preset.num_layers,
        "num_key_value_heads": preset.num_kv_heads,
        "num_local_experts": preset.num_experts,
        "output_router_logits": False,
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": preset.window,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": preset.vocab_size,
    }


def _generation_fields(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL_TOKENS}
    return {
        "bos_token_id": ids["<|startoftext|>"],
        "do_sample": True,
        "eos_token_id": [ids["<|return|>"], ids["<|endoftext|>"], ids["<|call|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }


def _write_weights(folder: pathlib.Path, preset: Preset, seed: int, num_files: int) -> None:
    """Writes the files and their index; the groups of tensors are spread over the files in order."""
    groups = [_outer_tensors(preset, "model.embed_tokens.weight")]
    groups += [_layer_tensors(preset, i) for i in range(preset.num_layers)]
    groups += [_outer_tensors(preset, "model.norm.weight") | _outer_tensors(preset, "lm_head.weight")]
    weight_map: dict[str, str] = {}
    total_size = 0
    for i in range(num_files):
        tensors: Tensors = {}
        for group in groups[i * len(groups) // num_files : (i + 1) * len(groups) // num_files]:
            tensors |= group
        name = f"model-{i:05d}-of-{num_files - 1:05d}.safetensors"  # counted from 0, as the published files are
        with SafetensorsWriter(folder / name, tensors, {"format": "pt"}) as writer:
            for tensor, (_, shape) in tensors.items():
                for rows in _random_rows(tensor, shape, seed):
                    writer.write(tensor, rows)
                    total_size += rows.nbytes
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _outer_tensors(preset: Preset, name: str) -> Tensors:
    V, D = preset.vocab_size, preset.hidden_size
    return {name: (_BF16, (D,) if name == "model.norm.weight" else (V, D))}


def _layer_tensors(preset: Preset, layer: int) -> Tensors:
    D, F, E, H = preset.hidden_size, preset.intermediate_size, preset.num_experts, preset.head_dim
    N, K = preset.num_heads, preset.num_kv_heads
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (N * H, D),
        "self_attn.q_proj.bias": (N * H,),
        "self_attn.k_proj.weight": (K * H, D),
        "self_attn.k_proj.bias": (K * H,),
        "self_attn.v_proj.weight": (K * H, D),
        "self_attn.v_proj.bias": (K * H,),
        "self_attn.o_proj.weight": (D, N * H),
        "self_attn.o_proj.bias": (D,),
        "self_attn.sinks": (N,),
        "mlp.router.weight": (E, D),
        "mlp.router.bias": (E,),
        "mlp.experts.gate_up_proj_blocks": (E, 2 * F, D // 32, 16),
        "mlp.experts.gate_up_proj_scales": (E, 2 * F, D // 32),
        "mlp.experts.gate_up_proj_bias": (E, 2 * F),
        "mlp.experts.down_proj_blocks": (E, D, F // 32, 16),
        "mlp.experts.down_proj_scales": (E, D, F // 32),
        "mlp.experts.down_proj_bias": (E, D),
    }
    return {
        f"model.layers.{layer}.{name}": (_U8 if name.endswith(("_blocks", "_scales")) else _BF16, shape)
        for name, shape in shapes.items()
    }


def _random_rows(name: str, shape: tuple[int, ...], seed: int) -> Iterator[NDArray[Any]]:
    """The values of a tensor, a bounded number of rows at a time, from a stream that its name and the seed select."""
    random = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))
    rows_at_once = max(1, _ROWS_BYTES // (4 * math.prod(shape[1:])))
    for start in range(0, shape[0], rows_at_once):
        yield draw_rows(random, name, shape, min(rows_at_once, shape[0] - start))


def _write_json(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def _expand(patterns: Iterable[str]) -> list[pathlib.Path]:
    """The files that the patterns name; a folder stands for the text files below it."""
    files: list[pathlib.Path] = []
    for pattern in patterns:
        if os.path.isdir(pattern):
            found = [p for p in pathlib.Path(pattern).rglob("*") if p.suffix in {".py", ".md", ".txt"} and p.is_file()]
        else:
            found = [pathlib.Path(p) for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)]
        if not found:
            raise ValueError(f"--train_on: {pattern!r} names no file")
        files += found
    return sorted(set(files))


def main(argv: Sequence[str]) -> None:
    """Runs the program."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    values = flags.FLAGS
    try:
        folder = make_checkpoint(
            values.output,
            PRESETS[values.preset],
            seed=values.seed,
            num_files=values.num_files,
            train_on=_expand(values.train_on),
        )
    except ValueError as error:
        sys.exit(f"make_checkpoint: {error}")
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"wrote {folder} ({size / 1e6:.1f} MB)")


def define_flags() -> None:
    """Defines the flags of the program."""
    flags.DEFINE_string("output", None, "Folder to make.", required=True)
    flags.DEFINE_enum("preset", "demo", sorted(PRESETS), "Sizes of the model.")
    flags.DEFINE_integer("seed", 0, "Seed of the weights.", lower_bound=0, upper_bound=2**63)
    flags.DEFINE_integer("num_files", 3, "Number of safetensors files.", lower_bound=1)
    flags.DEFINE_multi_string("train_on", [], "Files (a pattern) or folder to train the tokenizer on; repeatable.")


if __name__ == "__main__":
    define_flags()
    app.run(main)
