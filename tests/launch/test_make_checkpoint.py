"""The checkpoint writer: the published layout, the same values from the same seed, nothing half-written."""

from __future__ import annotations

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from slope_jax.launch import make_checkpoint as maker
from slope_jax.model.config import load_config
from slope_jax.model.tokenizer import load_tokenizer

TINY = maker.PRESETS["tiny"]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return maker.make_checkpoint(tmp_path_factory.mktemp("made") / "tiny", TINY, seed=3)


def load_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {name: safetensors.numpy.load_file(folder / name) for name in set(index["weight_map"].values())}
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert sum(len(file) for file in files.values()) == len(tensors)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    return tensors


def test_the_layout_is_the_published_one(tiny_dir: pathlib.Path) -> None:
    names = sorted(p.name for p in tiny_dir.iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model-00000-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    tensors = load_tensors(tiny_dir)
    assert len(tensors) == 3 + 4 * 19
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    for name, dtype, shape in (
        ("model.embed_tokens.weight", bfloat16, (512, 64)),
        ("lm_head.weight", bfloat16, (512, 64)),
        ("model.norm.weight", bfloat16, (64,)),
        ("model.layers.3.self_attn.q_proj.weight", bfloat16, (256, 64)),
        ("model.layers.3.self_attn.k_proj.bias", bfloat16, (64,)),
        ("model.layers.3.self_attn.o_proj.weight", bfloat16, (64, 256)),
        ("model.layers.0.self_attn.sinks", bfloat16, (8,)),
        ("model.layers.0.mlp.router.weight", bfloat16, (6, 64)),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", np.uint8, (6, 192, 2, 16)),
        ("model.layers.0.mlp.experts.gate_up_proj_scales", np.uint8, (6, 192, 2)),
        ("model.layers.0.mlp.experts.down_proj_blocks", np.uint8, (6, 64, 3, 16)),
        ("model.layers.0.mlp.experts.down_proj_bias", bfloat16, (6, 64)),
    ):
        assert (tensors[name].dtype, tensors[name].shape) == (dtype, shape), name


def test_the_config_reads_back(tiny_dir: pathlib.Path) -> None:
    config = load_config(tiny_dir)
    assert (config.num_layers, config.hidden_size, config.intermediate_size, config.vocab_size) == (4, 64, 96, 512)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.sliding_window) == (8, 2, 32, 16)
    assert (config.num_experts, config.experts_per_token, config.max_position) == (6, 2, 131_072)


def test_the_values_have_the_intended_sizes(tiny_dir: pathlib.Path) -> None:
    tensors = {name: t.astype(np.float64) for name, t in load_tensors(tiny_dir).items()}
    # Standard deviations over at least 512 values are within a tenth.
    assert np.std(tensors["model.embed_tokens.weight"]) == pytest.approx(1.0, rel=0.1)
    assert np.std(tensors["lm_head.weight"]) * 8 == pytest.approx(5.0, rel=0.1)
    assert np.std(tensors["model.layers.1.self_attn.o_proj.weight"]) * 16 == pytest.approx(1.0, rel=0.1)
    assert np.std(tensors["model.layers.1.mlp.experts.gate_up_proj_bias"]) == pytest.approx(0.1, rel=0.1)
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scales = tensors["model.layers.1.mlp.experts.gate_up_proj_scales"]
    size = np.sqrt(np.mean(codes**2) * np.mean(4.0 ** (scales - 127))) * 8
    assert 0.5 < size < 2
    for name, values in tensors.items():
        assert np.any(values != 0), name


def test_a_seed_gives_one_checkpoint(tiny_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    same = load_tensors(maker.make_checkpoint(tmp_path / "same", TINY, seed=3, num_files=1))
    other = load_tensors(maker.make_checkpoint(tmp_path / "other", TINY, seed=4, num_files=6))
    for name, values in load_tensors(tiny_dir).items():
        np.testing.assert_array_equal(values, same[name])
        assert not np.array_equal(values, other[name]), name


def test_the_tokenizer_reads_the_text_that_it_was_trained_on(tiny_dir: pathlib.Path) -> None:
    tokenizer = load_tokenizer(tiny_dir, TINY.vocab_size)
    assert tokenizer is not None
    assert tokenizer.max_id == TINY.vocab_size - 1
    for path in maker.project_files():
        text = path.read_text(encoding="utf-8")
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) < 0.8 * len(text)
    start = tokenizer.encode("<|start|>")
    assert len(start) == 1
    config = json.loads((tiny_dir / "config.json").read_text())
    assert tokenizer.decode([config["eos_token_id"]]) == "<|return|>"


def test_bad_arguments_leave_nothing_behind(tmp_path: pathlib.Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there exists"):
        maker.make_checkpoint(tmp_path / "there", TINY)
    with pytest.raises(ValueError, match=r"num_files must be in 1\.\.6 for this preset, not 7"):
        maker.make_checkpoint(tmp_path / "a", TINY, num_files=7)
    with pytest.raises(FileNotFoundError):
        maker.make_checkpoint(tmp_path / "a", TINY, train_on=[tmp_path / "missing.txt"])
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
