"""Eight virtual CPU devices, and tiny checkpoints written once per session."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import hypothesis
import jax
import pytest

from tests.oracle import checkpoints
from tests.oracle.checkpoints import WriteCheckpoint

jax.config.update("jax_num_cpu_devices", 8)

hypothesis.settings.register_profile("slope", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("slope")


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
