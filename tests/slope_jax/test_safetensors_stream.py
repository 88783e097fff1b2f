"""The streaming safetensors writer: readable by the library, exact about what was declared, nothing half-written."""

from __future__ import annotations

import pathlib

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from slope_jax.model.checkpoint.safetensors_writer import SafetensorsWriter

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
TENSORS = {
    "b": (BFLOAT16, (5, 3)),
    "nothing": (np.dtype(np.float32), (0, 4)),
    "a": (np.dtype(np.uint8), (7,)),
    "scalar": (np.dtype(np.float32), ()),
}
VALUES: dict[str, np.ndarray] = {
    "b": np.arange(15).reshape(5, 3).astype(BFLOAT16),
    "nothing": np.zeros((0, 4), np.float32),
    "a": np.arange(7, dtype=np.uint8),
    "scalar": np.array(2.5, np.float32),
}


def test_the_library_reads_what_was_written_in_pieces(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, TENSORS, {"k": "v"}) as writer:
        writer.write("b", VALUES["b"][:2])
        writer.write("b", np.asfortranarray(VALUES["b"][2:]))
        writer.write("a", np.repeat(VALUES["a"], 2)[::2])
        writer.write("scalar", VALUES["scalar"])
        assert not path.exists()
    loaded = safetensors.numpy.load_file(path)
    assert loaded.keys() == VALUES.keys()
    for name, values in VALUES.items():
        assert loaded[name].dtype == values.dtype
        np.testing.assert_array_equal(loaded[name], values)
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == {"k": "v"}
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 8 == 0
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("a", VALUES["a"], "a was written where b was expected"),
        ("b", VALUES["b"].astype(np.float32), "b takes 30 more bytes of bfloat16, not 60 of float32"),
        ("b", np.zeros((6, 3), BFLOAT16), "b takes 30 more bytes of bfloat16, not 36"),
        ("b", VALUES["b"], r"\['a', 'scalar'\] were declared but not wholly written"),
        ("b", VALUES["b"][:4], r"\['b', 'a', 'scalar'\] were declared but not wholly written"),
    ],
)
def test_what_was_not_declared_is_refused_and_leaves_the_old_file(
    tmp_path: pathlib.Path, name: str, values: np.ndarray, message: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("old")
    with pytest.raises(ValueError, match=message), SafetensorsWriter(path, TENSORS, {}) as writer:
        writer.write(name, values)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_dtype_that_is_not_used_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="dtype float16 is not one of"):
        SafetensorsWriter(tmp_path / "x", {"a": (np.dtype(np.float16), (1,))}, {})
    assert list(tmp_path.iterdir()) == []
