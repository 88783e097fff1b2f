"""A checkpoint is exactly what its index and its configuration say, or an error names the file and the tensor."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from slope_jax.model.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, Checkpoint
from tests.oracle import checkpoints
from tests.oracle.checkpoints import TOY, WriteCheckpoint

BIAS = "model.layers.2.self_attn.q_proj.bias"


@pytest.fixture
def folder(toy_dir: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A toy checkpoint in three files that a test may change."""
    return pathlib.Path(shutil.copytree(toy_dir, tmp_path / "toy"))


def edit_json(path: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def weight_map(folder: pathlib.Path) -> dict[str, str]:
    return json.loads((folder / INDEX_FILE).read_text())["weight_map"]


def file_of(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / weight_map(folder)[name]


def edit_file(path: pathlib.Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Rewrites a safetensors file after a change to its tensors."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(folder: pathlib.Path, *parts: object) -> None:
    """Asserts that opening fails with a message in which all of `parts` stand."""
    everywhere = "".join(f"(?=.*{re.escape(str(part))})" for part in parts)
    with pytest.raises(ValueError, match=f"^{everywhere}"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("num_files", [1, 3, 8])
@pytest.mark.parametrize("experts", ["mxfp4", "bfloat16", "float32"])
def test_reads_every_tensor(checkpoint: WriteCheckpoint, num_files: int, experts: checkpoints.ExpertForm) -> None:
    opened = Checkpoint.open(checkpoint(TOY, num_files=num_files, experts=experts))
    wanted = checkpoints.model_tensors(TOY, experts=experts)
    assert opened.quantized == (experts == "mxfp4")
    assert opened.tensors.keys() == wanted.keys()
    for name, value in wanted.items():
        read = opened.read(name)
        assert (read.dtype, opened.shape(name)) == (value.dtype, value.shape)
        assert read.tobytes() == value.tobytes()
    assert opened.bytes_read == sum(value.nbytes for value in wanted.values())


@hypothesis.given(data=st.data())
def test_slices_equal_numpy_and_count_their_bytes(toy_dir: pathlib.Path, data: st.DataObject) -> None:
    opened = Checkpoint.open(toy_dir)
    name = data.draw(st.sampled_from([BIAS, "lm_head.weight", "model.layers.1.mlp.experts.down_proj_blocks"]))
    index = []
    for size in opened.shape(name)[: data.draw(st.integers(0, len(opened.shape(name))))]:
        first, last = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
        index.append(slice(first, last))
    wanted = checkpoints.model_tensors(TOY)[name][tuple(index)]
    read = opened.read(name, *index)
    assert (read.shape, read.tobytes()) == (wanted.shape, wanted.tobytes())
    assert opened.bytes_read == wanted.nbytes


def test_one_file_needs_no_index(checkpoint: WriteCheckpoint, tmp_path: pathlib.Path) -> None:
    folder = pathlib.Path(shutil.copytree(checkpoint(TOY, num_files=1), tmp_path / "toy"))
    (folder / INDEX_FILE).unlink()
    assert Checkpoint.open(folder).tensors.keys() == checkpoints.model_tensors(TOY).keys()
    (folder / SINGLE_FILE).unlink()
    refused(folder, folder, "has neither")


def test_only_files_of_the_index_play_a_part(folder: pathlib.Path) -> None:
    for name in ("original", "metal"):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"of another format")
    (folder / "original" / "config.json").write_text("{}")
    (folder / "stale.safetensors").write_bytes(b"not listed")
    Checkpoint.open(folder)


def test_a_missing_file_is_named(folder: pathlib.Path) -> None:
    """Case L01."""
    path = file_of(folder, BIAS)
    path.unlink()
    refused(folder, path, "cannot be read", "No such file")


def test_a_folder_that_is_not_there_is_named(tmp_path: pathlib.Path) -> None:
    refused(tmp_path / "nothing", tmp_path / "nothing", "no such folder")


@pytest.mark.parametrize("keep", [0, 7, 100, -1, -100_000])
def test_a_truncated_file_is_named(folder: pathlib.Path, keep: int) -> None:
    path = file_of(folder, BIAS)
    content = path.read_bytes()
    path.write_bytes(content[:keep])
    refused(folder, path, "truncated")
    if keep < 0:
        refused(folder, len(content[:keep]), "tensor model.")


def test_a_file_with_bytes_too_many_is_named(folder: pathlib.Path) -> None:
    path = file_of(folder, BIAS)
    path.write_bytes(path.read_bytes() + b"\0")
    refused(folder, path, "its header describes")


def test_a_file_truncated_after_opening_is_named(folder: pathlib.Path) -> None:
    opened = Checkpoint.open(folder)
    info = opened.tensors[BIAS]
    with info.file.open("r+b") as file:
        file.truncate(info.offset + 10)
    with pytest.raises(ValueError, match=f"{info.file}: ends at byte {info.offset + 10}"):
        opened.read(BIAS)


def test_a_tensor_that_the_index_does_not_list_is_named(folder: pathlib.Path) -> None:
    """Case L01: a key is deleted from the index."""
    path = file_of(folder, BIAS)
    edit_json(folder / INDEX_FILE, lambda index: index["weight_map"].pop(BIAS))
    refused(folder, path, BIAS, "does not list it")


def test_a_tensor_that_the_index_lists_elsewhere_is_named(folder: pathlib.Path) -> None:
    path = file_of(folder, BIAS)
    other = next(file for file in sorted(set(weight_map(folder).values())) if file != path.name)
    edit_json(folder / INDEX_FILE, lambda index: index["weight_map"].update({BIAS: other}))
    refused(folder, BIAS, path.name, other)


def test_a_listed_tensor_that_its_file_lacks_is_named(folder: pathlib.Path) -> None:
    path = file_of(folder, BIAS)
    edit_file(path, lambda tensors: tensors.pop(BIAS))
    refused(folder, path, BIAS, "does not hold")


def test_an_unknown_tensor_is_named(folder: pathlib.Path) -> None:
    """Case L01: a key that no model has."""
    path = file_of(folder, BIAS)
    name = "model.layers.2.self_attn.q_norm.weight"
    edit_json(folder / INDEX_FILE, lambda index: index["weight_map"].update({name: path.name}))
    refused(folder, path, name, "does not hold")
    edit_file(path, lambda tensors: tensors.update({name: np.ones(8, np.float32)}))
    refused(folder, path, name, "surplus")


def test_a_missing_tensor_is_named(folder: pathlib.Path) -> None:
    path = file_of(folder, BIAS)
    edit_file(path, lambda tensors: tensors.pop(BIAS))
    edit_json(folder / INDEX_FILE, lambda index: index["weight_map"].pop(BIAS))
    refused(folder, folder, BIAS, "missing")


def test_a_layer_too_many_or_too_few_is_named(folder: pathlib.Path) -> None:
    kinds = list(TOY.layer_types)
    edit_json(folder / "config.json", lambda c: c.update(num_hidden_layers=7, layer_types=[*kinds, kinds[0]]))
    refused(folder, "model.layers.6.", "missing")
    edit_json(folder / "config.json", lambda c: c.update(num_hidden_layers=5, layer_types=kinds[:5]))
    refused(folder, "model.layers.5.", "surplus")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1], "has shape [255], config.json needs [256]"),
        (lambda x: x.reshape(2, -1), "has shape [2, 128]"),
        (lambda x: x.astype(np.float16), "has dtype F16"),
        (lambda x: x.astype(np.float64), "has dtype F64"),
        (lambda x: x.astype(np.uint8), "has dtype uint8, supported: bfloat16 or float32"),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(
    folder: pathlib.Path, change: Callable[[np.ndarray], np.ndarray], message: str
) -> None:
    path = file_of(folder, BIAS)
    edit_file(path, lambda tensors: tensors.update({BIAS: change(tensors[BIAS])}))
    refused(folder, path, BIAS, message)


def test_scales_must_be_bytes(folder: pathlib.Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    path = file_of(folder, name)
    edit_file(path, lambda tensors: tensors.update({name: tensors[name].astype(np.float32)}))
    refused(folder, path, name, "has dtype float32, supported: uint8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "weight_map is missing or empty"),
        ('{"weight_map": {}}', "weight_map is missing or empty"),
        ('{"weight_map": {"a": "../toy/model.safetensors"}}', "not the name of a file beside it"),
        ('{"weight_map": {"a": 3}}', "not the name of a file beside it"),
        ("not json", "not valid JSON"),
    ],
)
def test_an_index_that_is_not_one_is_named(folder: pathlib.Path, content: str, message: str) -> None:
    (folder / INDEX_FILE).write_text(content)
    refused(folder, folder / INDEX_FILE, message)


def replace_header(path: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the header of a safetensors file and leaves its data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def shift(header: dict[str, Any]) -> None:
    header[BIAS]["data_offsets"] = [offset + 2 for offset in header[BIAS]["data_offsets"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header[BIAS].update(shape=[250]), "needs 500"),
        (lambda header: header[BIAS].update(data_offsets=[0]), "is not valid"),
        (lambda header: header[BIAS].update(shape=[-256]), "is not valid"),
        (lambda header: header[BIAS].pop("dtype"), "is not valid"),
        (shift, "gap or overlap"),
    ],
)
def test_a_header_that_contradicts_itself_is_named(
    folder: pathlib.Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = file_of(folder, BIAS)
    replace_header(path, change)
    refused(folder, path, message)


@pytest.mark.parametrize("experts", ["mxfp4", "bfloat16"])
@pytest.mark.parametrize("method", [None, "mxfp4", "gptq"])
def test_quantization_config_and_tensors_must_agree(
    checkpoint: WriteCheckpoint, tmp_path: pathlib.Path, experts: str, method: str | None
) -> None:
    """Case L06: two of the six combinations are valid."""
    folder = pathlib.Path(shutil.copytree(checkpoint(TOY, experts=experts), tmp_path / "toy"))
    block = None if method is None else {"quant_method": method}
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=block))
    if (experts, method) in (("mxfp4", "mxfp4"), ("bfloat16", None)):
        assert Checkpoint.open(folder).quantized == (experts == "mxfp4")
    elif method == "gptq":
        refused(folder, folder / "config.json", "gptq")
    else:
        refused(folder, "quantization_config", ".mlp.experts.", folder / "config.json")


def test_mixed_experts_are_refused(folder: pathlib.Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"
    path = file_of(folder, f"{name}_bias")
    value = checkpoints.model_tensors(TOY, experts="bfloat16")[name]
    edit_file(path, lambda tensors: tensors.update({name: value}))
    edit_json(folder / INDEX_FILE, lambda index: index["weight_map"].update({name: path.name}))
    refused(folder, name, "both in MXFP4")
