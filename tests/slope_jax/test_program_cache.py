"""Compiled programs that are found again are the same, and none is taken for another."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from slope_jax import Engine, MeshShape
from slope_jax.execution import program_cache
from slope_jax.execution.spec import TickPrograms
from slope_jax.mesh.axes import make_mesh
from tests.oracle import checkpoints
from tests.slope_jax.engines import check


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(program_cache, "cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def kept(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("slope_jax-*.pickle"))


def cannot_lower(*_: Any, **__: Any) -> Any:
    """In the place of what makes a program that must be found."""
    raise AssertionError("a program was lowered")


def test_a_second_start_compiles_no_tick(
    toy_dir: pathlib.Path, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"dtype": "float32", "chunk_tokens": 16, "kv_cache_tokens": 64, "page_tokens": 8}
    prompt = checkpoints.random_prompt(checkpoints.TOY, 50)
    first = Engine.load(toy_dir, mesh=MeshShape(2, 1, 2), **options)
    first.warmup()
    assert len(kept(folder)) == len(first.buckets)
    monkeypatch.setattr(TickPrograms, "lower", cannot_lower)
    second = Engine.load(toy_dir, mesh=MeshShape(2, 1, 2), **options)
    second.warmup()
    results = [it.prefill([prompt])[0] for it in (first, second)]
    check(toy_dir, [prompt, prompt], results)
    np.testing.assert_array_equal(results[0].logits, results[1].logits)
    # The pool is still given away to each tick rather than copied.
    assert first.memory() == second.memory()
    with pytest.raises(AssertionError, match="a program was lowered"):
        Engine.load(toy_dir, mesh=MeshShape(2, 1, 2), **{**options, "block_kv": 8}).warmup()


def compiled(factor: float = 2, size: int = 4, lower: Callable[[], Any] | None = None) -> Callable[..., Any]:
    mesh = make_mesh(MeshShape())
    shape = jax.ShapeDtypeStruct((size,), np.float32, sharding=jax.NamedSharding(mesh, P()))
    program: Callable[..., Any] = program_cache.compile_program(
        lower or (lambda: jax.jit(lambda x: factor * x).lower(shape)), mesh, (factor, *program_cache.shapes_of([shape]))
    )
    return program


def run(program: Callable[..., Any], size: int = 4) -> np.ndarray:
    mesh = make_mesh(MeshShape())
    return np.asarray(program(jax.device_put(np.arange(size, dtype=np.float32), jax.NamedSharding(mesh, P()))))


def test_everything_that_a_program_depends_on_counts(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled()
    np.testing.assert_array_equal(run(compiled(lower=cannot_lower)), [0, 2, 4, 6])
    assert len(kept(folder)) == 1
    np.testing.assert_array_equal(run(compiled(3)), [0, 3, 6, 9])
    np.testing.assert_array_equal(run(compiled(size=2), 2), [0, 2])
    changes: list[Callable[[pytest.MonkeyPatch], None]] = [
        lambda patch: patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false"),
        lambda patch: patch.setattr(program_cache, "_source_hash", lambda: "of other code"),
        lambda patch: patch.setattr(program_cache, "_cpu", lambda: "of another machine"),
        lambda patch: patch.setattr(jax, "__version__", "0.0.0"),
    ]
    for change in changes:
        before = len(kept(folder))
        with monkeypatch.context() as patch:
            change(patch)
            compiled()
        assert len(kept(folder)) == before + 1
    compiled(lower=cannot_lower)
    assert program_cache._source_hash() == program_cache._source_hash()


@pytest.mark.parametrize("content", [b"", b"not a pickle", "half", "a changed bit", "another program"])
def test_a_damaged_file_is_compiled_again(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture, content: bytes | str
) -> None:
    compiled()
    (file,) = kept(folder)
    good = file.read_bytes()
    if content == "another program":
        compiled(3)
        content = next(other for other in kept(folder) if other != file).read_bytes()
    if content == "a changed bit":  # in the middle, where the machine code is
        content = good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :]
    file.write_bytes(good[: len(good) // 2] if isinstance(content, str) else content)
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(run(compiled()), [0, 2, 4, 6])
    assert file.name in caplog.text
    compiled(lower=cannot_lower)


def test_without_a_folder_nothing_is_kept() -> None:
    np.testing.assert_array_equal(run(compiled()), [0, 2, 4, 6])
    with pytest.raises(AssertionError, match="a program was lowered"):
        compiled(lower=cannot_lower)


TWO_ENGINES = """
import sys
import jax
import numpy as np
from slope_jax import Engine, MeshShape

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

options = {"mesh": MeshShape(1, 2, 2), "dtype": "float32", "kv_cache_tokens": 64, "page_tokens": 8}
for chunk_tokens in (16, 17):  # which differ in nothing but the name of what they are made from
    engine = Engine.load(sys.argv[1], chunk_tokens=chunk_tokens, **options)
    print(engine.prefill([list(range(1, 50))])[0].token_id)
"""


def test_a_program_that_jax_has_kept_already_can_be_found_again(toy_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """XLA cannot write a program twice: once read from JAX's cache, it loses its functions when it is written again."""
    command = [sys.executable, "-c", TWO_ENGINES, os.fspath(toy_dir), os.fspath(tmp_path / "cache")]
    tokens = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(2)]
    assert len(set(tokens[0])) == 1
    assert tokens[0] == tokens[1]


EDITED = """
import sys
import jax
from slope_jax import Engine
from slope_jax.execution import program_cache
from slope_jax.execution.spec import TickPrograms

jax.config.update("jax_compilation_cache_dir", sys.argv[2])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
program_cache._source_hash = lambda: sys.argv[3]
lowered, lower = [], TickPrograms.lower
TickPrograms.lower = lambda *arguments: (lowered.append(1), lower(*arguments))[1]
engine = Engine.load(sys.argv[1], dtype="float32", chunk_tokens=16, kv_cache_tokens=64, page_tokens=8)
print(engine.prefill([list(range(1, 50))])[0].token_id, len(lowered))
"""


def test_an_edit_that_changes_no_program_costs_one_start(toy_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def start(source: str) -> list[str]:
        command = [sys.executable, "-c", EDITED, os.fspath(toy_dir), os.fspath(tmp_path / "cache"), source]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    starts = [start(source) for source in ("before", "after", "after")]
    assert len({token for token, _ in starts}) == 1
    assert [lowered for _, lowered in starts] == ["1", "1", "0"]
