"""The hyperparameters of the published models, for work on their sizes without a checkpoint."""

from __future__ import annotations

import os
import pathlib

from slope_jax.model.config import FULL, SLIDING, GptOssConfig, RopeConfig, load_config, read_json

_LAYERS_AND_EXPERTS = {"gpt-oss-20b": (24, 32), "gpt-oss-120b": (36, 128)}

PUBLISHED = tuple(_LAYERS_AND_EXPERTS)


def published_config(name: str) -> GptOssConfig:
    """The hyperparameters of a published model; the two differ in layers and experts only.

    Raises:
      ValueError: there is no published model of that name.
    """
    if name not in _LAYERS_AND_EXPERTS:
        raise ValueError(f"{name!r} is not a published model; there are {', '.join(PUBLISHED)}")
    num_layers, num_experts = _LAYERS_AND_EXPERTS[name]
    return GptOssConfig(
        vocab_size=201_088,
        hidden_size=2880,
        intermediate_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        num_experts=num_experts,
        experts_per_token=4,
        sliding_window=128,
        layer_types=tuple((SLIDING, FULL)[layer % 2] for layer in range(num_layers)),
        max_position=131_072,
        rms_norm_eps=1e-5,
        swiglu_limit=7.0,
        rope=RopeConfig(theta=150_000.0, factor=32.0, original_max_position=4096, truncate=False),
        eos_token_ids=(200_002, 199_999, 200_012),
    )


def find_config(name: str | os.PathLike[str]) -> GptOssConfig:
    """The hyperparameters of a published model by its name, or those in a checkpoint folder or a config.json.

    Raises:
      ValueError: there is neither such a model nor such a file, or the file is refused (see `load_config`).
    """
    if name in PUBLISHED:
        return published_config(str(name))
    path = pathlib.Path(name)
    if path.is_dir():
        return load_config(path)
    if not path.is_file():
        raise ValueError(f"{os.fspath(name)!r} is neither a published model ({', '.join(PUBLISHED)}) nor a path")
    try:
        return GptOssConfig.from_json(read_json(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
