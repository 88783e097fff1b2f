"""A converted checkpoint loads to the same bits as its source, on any mesh, and each part of it is Orbax's own."""

from __future__ import annotations

import json
import math
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from slope_jax.mesh.axes import MeshShape, make_mesh
from slope_jax.model.checkpoint import orbax, weights
from slope_jax.model.checkpoint.orbax import ConvertedCheckpoint
from slope_jax.model.checkpoint.safetensors import Checkpoint
from slope_jax.model.config import load_config
from slope_jax.model.stage_plan import plan_stages
from tests.oracle import checkpoints
from tests.oracle.checkpoints import TOY, WIDE, WriteCheckpoint

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT32 = np.dtype(np.float32)


def load(
    directory: pathlib.Path, shape: tuple[int, int, int], dtype: Any, packed: bool, expert_parallel: bool = False
) -> list[jax.Array]:
    config = load_config(directory)
    plan = plan_stages(config.layer_types, shape[0])
    mesh = make_mesh(MeshShape(*shape), jax.devices()[: math.prod(shape)])
    _, state = weights.load_model(weights.open_source(directory), config, plan, mesh, dtype, packed, expert_parallel)
    return jax.tree.leaves(state)


def assert_same_bits(actual: list[jax.Array], wanted: list[jax.Array]) -> None:
    assert len(actual) == len(wanted)
    for a, w in zip(actual, wanted, strict=True):
        assert (a.dtype, a.shape, a.sharding) == (w.dtype, w.shape, w.sharding)
        assert np.asarray(a).tobytes() == np.asarray(w).tobytes()


@pytest.fixture(scope="module")
def converted(toy_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    output = tmp_path_factory.mktemp("converted") / "toy"
    orbax.convert(Checkpoint.open(toy_dir), output)
    return output


@pytest.fixture
def broken(converted: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy that a test may damage."""
    return pathlib.Path(shutil.copytree(converted, tmp_path / "broken"))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (4, 1, 2), (3, 1, 1)], ids=str)
@pytest.mark.parametrize(("dtype", "packed"), [(BFLOAT16, False), (BFLOAT16, True), (FLOAT32, False)])
def test_bits_are_those_of_the_source(
    toy_dir: pathlib.Path, converted: pathlib.Path, shape: tuple[int, int, int], dtype: np.dtype, packed: bool
) -> None:
    assert_same_bits(load(converted, shape, dtype, packed), load(toy_dir, shape, dtype, packed))


@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
def test_bits_are_those_of_the_source_with_experts_split(
    toy_dir: pathlib.Path, converted: pathlib.Path, packed: bool
) -> None:
    found, wanted = (load(d, (2, 1, 4), BFLOAT16, packed, expert_parallel=True) for d in (converted, toy_dir))
    assert_same_bits(found, wanted)


def test_pieces_parts_and_unpacked_experts_join_exactly(
    checkpoint: WriteCheckpoint, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint(WIDE)
    monkeypatch.setattr(orbax, "PIECE_BYTES", 30_000)
    monkeypatch.setattr(orbax, "PART_BYTES", 500_000)
    monkeypatch.setattr(orbax, "CHUNK_BYTES", 5_000)
    orbax.convert(Checkpoint.open(source), tmp_path / "out", dtype="bfloat16", experts="bfloat16")
    assert len(list((tmp_path / "out").glob("part_*"))) > 3
    assert not ConvertedCheckpoint.open(tmp_path / "out").quantized
    assert_same_bits(load(tmp_path / "out", (1, 3, 1), BFLOAT16, False), load(source, (1, 3, 1), BFLOAT16, False))
    with pytest.raises(ValueError, match="not quantised"):
        load(tmp_path / "out", (1, 1, 1), BFLOAT16, True)


def test_a_part_of_a_tensor_needs_only_its_chunks(
    checkpoint: WriteCheckpoint, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbax, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(orbax, "CHUNK_BYTES", 2_000)
    orbax.convert(Checkpoint.open(checkpoint(TOY)), tmp_path / "out")
    source = Checkpoint.open(checkpoint(TOY))
    result = ConvertedCheckpoint.open(tmp_path / "out")
    name = "model.layers.4.mlp.experts.gate_up_proj_blocks"
    np.testing.assert_array_equal(result.read(name, slice(3, 6)), source.read(name, slice(3, 6)))
    assert result.bytes_read == 3 * 2 * TOY.intermediate * TOY.hidden // 2

    before = result.bytes_read
    columns = (slice(50, 60), slice(12, 24))
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(result.read(name, *columns), source.read(name, *columns))
    assert 10 * 12 * 2 <= result.bytes_read - before <= 4_000


def test_every_part_is_an_orbax_checkpoint(toy_dir: pathlib.Path, converted: pathlib.Path) -> None:
    tensors = checkpoints.model_tensors(TOY)
    found: dict[str, list[tuple[int, np.ndarray]]] = {}
    with ocp.StandardCheckpointer() as checkpointer:
        for part in converted.glob("part_*"):
            for key, value in checkpointer.restore(part).items():
                name, start = key.split(":")
                found.setdefault(name, []).append((int(start), np.asarray(value)))
    assert found.keys() == tensors.keys()
    for name, pieces in found.items():
        values = [value for _, value in sorted(pieces, key=lambda piece: piece[0])]
        axis = 1 if name == "model.embed_tokens.weight" else 0
        np.testing.assert_array_equal(np.concatenate(values, axis), tensors[name])


def test_what_was_rounded_is_not_loaded_as_float32(checkpoint: WriteCheckpoint, tmp_path: pathlib.Path) -> None:
    source = checkpoint(TOY, experts="float32", dtype="float32")
    orbax.convert(Checkpoint.open(source), tmp_path / "narrow", dtype="bfloat16")
    orbax.convert(Checkpoint.open(source), tmp_path / "wide", dtype="float32")
    with pytest.raises(ValueError, match="converted for bfloat16 and cannot be loaded as float32"):
        load(tmp_path / "narrow", (1, 1, 1), FLOAT32, False)
    assert_same_bits(load(tmp_path / "wide", (1, 1, 1), FLOAT32, False), load(source, (1, 1, 1), FLOAT32, False))
    for output in ("narrow", "wide"):
        assert_same_bits(load(tmp_path / output, (1, 1, 1), BFLOAT16, False), load(source, (1, 1, 1), BFLOAT16, False))
    narrow = ConvertedCheckpoint.open(tmp_path / "narrow")
    assert narrow.dtype("lm_head.weight") == BFLOAT16
    assert narrow.dtype("model.norm.weight") == FLOAT32, "a bfloat16 model keeps its norms in float32"


def test_conversions_that_are_refused(checkpoint: WriteCheckpoint, tmp_path: pathlib.Path) -> None:
    plain = Checkpoint.open(checkpoint(TOY, experts="bfloat16"))
    with pytest.raises(ValueError, match="not quantised and cannot be written in mxfp4"):
        orbax.convert(plain, tmp_path / "out", experts="mxfp4")
    with pytest.raises(ValueError, match="must be bfloat16 or float32, not float16"):
        orbax.convert(plain, tmp_path / "out", dtype="float16")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match="full: exists already"):
        orbax.convert(plain, tmp_path / "full")


@pytest.mark.parametrize("experts", ["mxfp4", "bfloat16"])
def test_a_scale_of_255_is_not_converted(toy_dir: pathlib.Path, tmp_path: pathlib.Path, experts: str) -> None:
    name = "model.layers.0.mlp.experts.down_proj_scales"
    source = Checkpoint.open(pathlib.Path(shutil.copytree(toy_dir, tmp_path / "in")))
    info = source.tensors[name]
    with info.file.open("r+b") as file:
        file.seek(info.offset)
        file.write(b"\xff")
    with pytest.raises(ValueError, match=rf"{name}.*\(0, 0, 0\) is 255"):
        orbax.convert(source, tmp_path / "out", experts=experts)
    assert not orbax.is_converted(tmp_path / "out")


def edit_index(directory: pathlib.Path, change: Any) -> None:
    path = directory / orbax.INDEX_FILE
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_missing_and_truncated_files_are_named(broken: pathlib.Path) -> None:
    largest = max((p for p in broken.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=rf"{largest}: has {len(content) - 1} bytes"):
        ConvertedCheckpoint.open(broken)
    largest.unlink()
    with pytest.raises(ValueError, match=f"{largest}: cannot be read"):
        ConvertedCheckpoint.open(broken)


def test_an_index_that_disagrees_is_refused(broken: pathlib.Path) -> None:
    name = "model.layers.2.self_attn.sinks"
    edit_index(broken, lambda index: index["tensors"].update(surplus=index["tensors"][name]))
    with pytest.raises(ValueError, match="surplus tensor surplus"):
        ConvertedCheckpoint.open(broken)
    edit_index(broken, lambda index: index["tensors"].pop("surplus"))
    edit_index(broken, lambda index: index["tensors"][name].update(dtype="uint8"))
    with pytest.raises(ValueError, match=f"tensor {name} has dtype uint8"):
        ConvertedCheckpoint.open(broken)
    edit_index(broken, lambda index: index["tensors"][name].update(dtype="float32"))
    with pytest.raises(ValueError, match=f"part_00000: tensor {name}: is bfloat16"):
        ConvertedCheckpoint.open(broken).read(name)
    edit_index(broken, lambda index: index["tensors"][name].update(dtype="bfloat16", pieces=[["part_00000", 0, 7]]))
    with pytest.raises(ValueError, match=f"tensor {name}: the pieces do not make up"):
        ConvertedCheckpoint.open(broken)
    edit_index(broken, lambda index: index["tensors"].pop(name))
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        ConvertedCheckpoint.open(broken)


def test_another_format_version_is_refused(broken: pathlib.Path) -> None:
    marker = json.loads((broken / orbax.MARKER_FILE).read_text())
    (broken / orbax.MARKER_FILE).write_text(json.dumps(marker | {"format_version": 2}))
    with pytest.raises(ValueError, match="format version 2 is not 1"):
        ConvertedCheckpoint.open(broken)


def test_the_program(toy_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "in").mkdir()
    for file in toy_dir.iterdir():
        (tmp_path / "in" / file.name).symlink_to(file)
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    arguments = [f"--checkpoint={tmp_path / 'in'}", f"--output={tmp_path / 'out'}", "--expert_weights=bfloat16"]

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "slope_jax.launch.convert", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    first = run()
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith(f"wrote {tmp_path / 'out'}: ")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert load_config(tmp_path / "out") == load_config(toy_dir)
    assert_same_bits(load(tmp_path / "out", (2, 1, 1), BFLOAT16, False), load(toy_dir, (2, 1, 1), BFLOAT16, False))
    second = run()
    assert (second.returncode, second.stdout) == (1, "")
    assert "exists already" in second.stderr
