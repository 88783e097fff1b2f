"""Eight virtual CPU devices, compiled programs shared by all processes, and tiny checkpoints written once."""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import pytest

from slope_jax.execution import program_cache
from tests.oracle import checkpoints
from tests.oracle.checkpoints import WriteCheckpoint

jax.config.update("jax_num_cpu_devices", 8)

hypothesis.settings.register_profile("slope", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("slope")


def pytest_configure(config: pytest.Config) -> None:
    """Lets JAX keep what it compiles for all processes of the session: many tests need the same programs.

    They are found by the code that the compiler is given, so that a test that changes a function gets a new program.
    """
    if hasattr(config, "workerinput"):  # a worker of xdist, which has the environment of the process that started it
        return
    folder = tempfile.mkdtemp(prefix="slope_jax-programs-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    for name, value in (
        ("jax_compilation_cache_dir", folder),
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ("jax_persistent_cache_min_entry_size_bytes", 0),
    ):
        os.environ[name.upper()] = str(value)
        jax.config.update(name, value)


@pytest.fixture(scope="session", autouse=True)
def _engines_make_their_programs() -> Iterator[None]:
    """The engine's own cache finds programs by the source code, and would not see what a test changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_cache, "cache_folder", lambda: None)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> WriteCheckpoint:
    """A function that writes a checkpoint of a `TinyModel` with the options of `write_checkpoint`."""

    @functools.cache
    def write(model: checkpoints.TinyModel, **options: Any) -> pathlib.Path:
        return checkpoints.write_checkpoint(model, tmp_path_factory.mktemp("checkpoint"), **options)

    return write


@pytest.fixture(scope="session")
def toy_dir(checkpoint: WriteCheckpoint) -> pathlib.Path:
    """The toy model in MXFP4."""
    return checkpoint(checkpoints.TOY)


@pytest.fixture(scope="session")
def toy_irregular_dir(checkpoint: WriteCheckpoint) -> pathlib.Path:
    """The toy model with irregular layer types, in MXFP4."""
    return checkpoint(checkpoints.TOY_IRREGULAR)


@pytest.fixture(scope="session")
def toy8_dir(checkpoint: WriteCheckpoint) -> pathlib.Path:
    """The toy model of eight layers, in MXFP4."""
    return checkpoint(checkpoints.TOY8)


@pytest.fixture(scope="session")
def wide_dir(checkpoint: WriteCheckpoint) -> pathlib.Path:
    """The model with another arrangement of heads, in MXFP4."""
    return checkpoint(checkpoints.WIDE)
