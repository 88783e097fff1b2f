"""The KV hand-off: every element arrives where its code says, and a reader refuses what does not fit, by name."""

from __future__ import annotations

import hashlib
import json
import pathlib
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from slope_jax.kv.files import KVHeader, LayerKV, PrefillKV, hash_token_ids, load_kv
from slope_jax.model.config import FULL, SLIDING, GptOssConfig, RopeConfig

KINDS = (SLIDING, FULL, SLIDING, SLIDING, FULL)
KV_HEADS, HEAD_DIM, WINDOW = 16, 4, 8
CONFIG = GptOssConfig(
    vocab_size=211,
    hidden_size=96,
    intermediate_size=160,
    num_heads=48,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    num_experts=6,
    experts_per_token=2,
    sliding_window=WINDOW,
    layer_types=KINDS,
    max_position=1024,
    rms_norm_eps=1e-5,
    swiglu_limit=7.0,
    rope=RopeConfig(theta=100.0, factor=8.0, original_max_position=256),
)
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def code(layer: int, is_value: bool, start: int, count: int) -> np.ndarray:
    """Element [t, h, d] is a number that no other element of the cache has."""
    t, h, d = np.ogrid[start : start + count, :KV_HEADS, :HEAD_DIM]
    return (((2 * layer + is_value) * 64 + t) * KV_HEADS + h) * HEAD_DIM + d


def make_kv(tokens: int, dtype: str = "float32", **changes: Any) -> PrefillKV:
    ids = [(7 * i) % 211 for i in range(tokens)]
    header = KVHeader.of_prompt(CONFIG, ids, first_token_id=17, dtype=dtype, model_fingerprint="fp-1")

    def fetch(layer: int) -> LayerKV:
        count = min(tokens, WINDOW) if KINDS[layer] == SLIDING else tokens
        start = tokens - count
        # In bfloat16 the codes would not be exact; their low 7 bits are.
        k, v = (code(layer, is_value, start, count) for is_value in (False, True))
        if dtype == "bfloat16":
            k, v = k % 128, v % 128
        return start, k.astype(DTYPES[dtype]), v.astype(DTYPES[dtype])

    return PrefillKV(header, fetch, **changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 40])
def test_what_is_saved_is_what_is_loaded(tmp_path: pathlib.Path, tokens: int, dtype: str) -> None:
    kv = make_kv(tokens, dtype)
    assert kv.save(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    loaded = load_kv(tmp_path / "a" / "b")
    assert loaded.num_layers == kv.num_layers == 5
    total = 0
    for layer, kind in enumerate(KINDS):
        start, k, v = loaded.layer(layer)
        count = min(tokens, WINDOW) if kind == SLIDING else tokens
        assert start == tokens - count
        for is_value, array in ((False, k), (True, v)):
            expected = code(layer, is_value, start, count)
            assert array.dtype == DTYPES[dtype]
            np.testing.assert_array_equal(array.astype(np.float64), expected % 128 if dtype == "bfloat16" else expected)
            total += array.nbytes
    assert loaded.nbytes == kv.nbytes == total
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["kv.json", "kv.safetensors"]


@pytest.mark.parametrize("ways", [1, 2, 8, 16])
def test_a_decoder_of_any_head_split_reads_its_own_heads(tmp_path: pathlib.Path, ways: int) -> None:
    """CASES P16: the file is read without this package, by what the header says."""
    make_kv(20).save(tmp_path)
    header = json.loads((tmp_path / "kv.json").read_text())
    tensors = safetensors.numpy.load_file(tmp_path / "kv.safetensors")
    assert header["axes"] == ["tokens", "kv_heads", "head_dim"]
    assert header["rope_applied"] is True
    heads = header["kv_heads"] // ways
    for rank in range(ways):
        for entry in header["layers"]:
            for is_value, name in ((False, "key"), (True, "value")):
                own = tensors[entry[name]][:, rank * heads : (rank + 1) * heads]
                expected = code(entry["layer"], is_value, entry["start"], entry["count"])
                np.testing.assert_array_equal(own, expected[:, rank * heads : (rank + 1) * heads])


def test_the_header_describes_the_prompt(tmp_path: pathlib.Path) -> None:
    make_kv(9).save(tmp_path)
    header = json.loads((tmp_path / "kv.json").read_text())
    assert header["format"] == "slope_jax.kv"
    assert header["format_version"] == 1
    assert header["num_tokens"] == 9
    assert header["first_token_id"] == 17
    assert header["model_fingerprint"] == "fp-1"
    ids = b"".join(struct.pack("<q", (7 * i) % 211) for i in range(9))
    assert header["token_ids_sha256"] == hashlib.sha256(ids).hexdigest()
    assert [e["start"] for e in header["layers"]] == [1, 0, 1, 1, 0]
    assert [e["count"] for e in header["layers"]] == [8, 9, 8, 8, 9]
    assert [e["kind"] for e in header["layers"]] == list(KINDS)


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"model_fingerprint": "fp-2"}, "model_fingerprint is 'fp-1'; the reader needs 'fp-2'"),
        ({"token_ids": [1, 2]}, f"token_ids_sha256 is '.*'; the reader needs '{hash_token_ids([1, 2])}'"),
        ({"dtype": "bfloat16"}, "dtype is 'float32'; the reader needs 'bfloat16'"),
        ({"kv_heads": 8}, "kv_heads is 16; the reader needs 8"),
        ({"head_dim": 64}, "head_dim is 4; the reader needs 64"),
        ({"num_layers": 6}, "number of layers is 5; the reader needs 6"),
    ],
)
def test_a_cache_that_the_reader_cannot_use_is_refused(
    tmp_path: pathlib.Path, needs: dict[str, Any], message: str
) -> None:
    make_kv(9).save(tmp_path)
    fits: dict[str, Any] = {"model_fingerprint": "fp-1", "dtype": "float32", "kv_heads": 16, "head_dim": 4}
    load_kv(tmp_path, **fits, token_ids=[(7 * i) % 211 for i in range(9)], num_layers=5)
    with pytest.raises(ValueError, match=message):
        load_kv(tmp_path, **needs)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format_version", 2),
        ("format", "other"),
        ("axes", ["kv_heads", "tokens", "head_dim"]),
        ("rope_applied", False),
        ("dtype", "float16"),
        ("num_tokens", 10),
        ("kv_heads", 8),
        ("surplus", 1),
        ("kv_heads", None),
    ],
)
def test_a_changed_header_is_refused(tmp_path: pathlib.Path, field: str, value: Any) -> None:
    make_kv(9).save(tmp_path)
    header = json.loads((tmp_path / "kv.json").read_text())
    if value is None:
        del header[field]
    else:
        header[field] = value
    (tmp_path / "kv.json").write_text(json.dumps(header))
    with pytest.raises(ValueError, match=r"kv\.(json|safetensors)"):
        load_kv(tmp_path)


@pytest.mark.parametrize("bytes_cut", [1, 100, 10**9])
def test_a_truncated_file_is_refused(tmp_path: pathlib.Path, bytes_cut: int) -> None:
    make_kv(9).save(tmp_path)
    data = (tmp_path / "kv.safetensors").read_bytes()
    (tmp_path / "kv.safetensors").write_bytes(data[: max(0, len(data) - bytes_cut)])
    with pytest.raises(ValueError, match=r"kv\.safetensors: cannot be read"):
        load_kv(tmp_path)


def test_missing_files_are_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"kv\.json: cannot be read"):
        load_kv(tmp_path)
    make_kv(9).save(tmp_path)
    (tmp_path / "kv.safetensors").unlink()
    with pytest.raises(ValueError, match=r"kv\.safetensors: cannot be read"):
        load_kv(tmp_path)


def test_files_of_two_caches_are_refused(tmp_path: pathlib.Path) -> None:
    make_kv(9).save(tmp_path / "a")
    make_kv(40).save(tmp_path / "b")
    (tmp_path / "a" / "kv.safetensors").replace(tmp_path / "b" / "kv.safetensors")
    with pytest.raises(ValueError, match="different caches"):
        load_kv(tmp_path / "b")


def test_a_cache_is_replaced_only_when_asked(tmp_path: pathlib.Path) -> None:
    make_kv(9).save(tmp_path)
    with pytest.raises(ValueError, match="exists; save to another folder or pass overwrite=True"):
        make_kv(40).save(tmp_path)
    assert load_kv(tmp_path).header.num_tokens == 9
    make_kv(40).save(tmp_path, overwrite=True)
    assert load_kv(tmp_path).header.num_tokens == 40


def test_only_the_writer_writes_but_every_process_fetches(tmp_path: pathlib.Path) -> None:
    kv, fetched = make_kv(9), list[int]()

    def fetch(layer: int) -> LayerKV:
        fetched.append(layer)
        return kv.layer(layer)

    PrefillKV(kv.header, fetch, is_writer=False).save(tmp_path / "a")
    assert fetched == [0, 1, 2, 3, 4]
    assert not (tmp_path / "a").exists()


def test_a_failing_writer_still_takes_part_in_every_fetch(tmp_path: pathlib.Path) -> None:
    kv, fetched = make_kv(9), list[int]()

    def fetch(layer: int) -> LayerKV:
        fetched.append(layer)
        return kv.layer(layer)

    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(OSError, match="file"):
        PrefillKV(kv.header, fetch).save(tmp_path / "file" / "a")
    assert fetched == [0, 1, 2, 3, 4]


def test_a_failing_fetch_leaves_nothing_behind(tmp_path: pathlib.Path) -> None:
    kv = make_kv(9)

    def fetch(layer: int) -> LayerKV:
        if layer == 3:
            raise RuntimeError("device lost")
        return kv.layer(layer)

    with pytest.raises(RuntimeError, match="device lost"):
        PrefillKV(kv.header, fetch).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_layers_of_the_wrong_form_are_refused() -> None:
    kv = make_kv(9)
    good = kv.layer(2)
    for start, k in ((0, good[1]), (1, good[1][1:]), (1, good[1].astype(np.float64)), (1, good[1].swapaxes(1, 2))):
        with pytest.raises(ValueError, match=r"keys of layer 2 .* expected start 1, shape \(8, 16, 4\)"):
            PrefillKV(kv.header, lambda _, start=start, k=k: (start, k, good[2])).layer(2)  # type: ignore[misc]
    for layer in (-1, 5):
        with pytest.raises(ValueError, match=f"layer {layer} is not one of the 5 layers"):
            kv.layer(layer)
