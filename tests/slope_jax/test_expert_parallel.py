"""The invariance law with expert parallelism: results do not depend on where the experts are."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from slope_jax import Engine, MeshShape
from slope_jax.mesh.axes import make_mesh
from slope_jax.model.config import load_config
from slope_jax.model.gpt_oss import abstract_model
from slope_jax.model.stage_plan import plan_stages
from tests.oracle import checkpoints, golden
from tests.oracle.checkpoints import TOY, TOY8, TOY_IRREGULAR, WIDE, TinyModel, WriteCheckpoint
from tests.slope_jax.engines import check, engine

LENGTHS = (1, 9, 40, 150)


def prompts_of(model: TinyModel, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [checkpoints.random_prompt(model, n, seed=n) for n in lengths]


@pytest.mark.parametrize(
    ("model", "shape", "form"),
    [
        (TOY8, MeshShape(2, 2, 2), "bfloat16"),
        (TOY8, MeshShape(1, 2, 4), "mxfp4"),
        (TOY8, MeshShape(1, 1, 8), "bfloat16"),
        (TOY, MeshShape(4, 1, 2), "mxfp4"),  # stages with empty slots
        (TOY_IRREGULAR, MeshShape(2, 1, 4), "bfloat16"),  # the same, of irregular kinds
        (WIDE, MeshShape(1, 1, 4), "mxfp4"),  # three experts on a rank
    ],
    ids=lambda x: str(x) if isinstance(x, MeshShape) else "",
)
def test_every_mesh_and_form(checkpoint: WriteCheckpoint, model: TinyModel, shape: MeshShape, form: str) -> None:
    directory, prompts = checkpoint(model), prompts_of(model)
    it = engine(directory, shape, expert_parallel=True, expert_weights=form)
    check(directory, prompts, it.prefill(prompts))
    layers = len(it._plan.pattern)
    assert all(tick.expert_rounds >= layers for tick in it.last_ticks if shape.pp == 1)


def with_router_bias(directory: pathlib.Path, output: pathlib.Path, bias: dict[int, float]) -> pathlib.Path:
    """A copy whose routers prefer some experts by so much that all tokens go there."""
    shutil.copytree(directory, output)
    for file in output.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("mlp.router.bias"):
                for expert, value in bias.items():
                    tensors[name][expert] = ml_dtypes.bfloat16(value)
        save_file(tensors, file, metadata={"format": "pt"})
    return output


@pytest.mark.parametrize("shape", [MeshShape(1, 1, 8), MeshShape(2, 1, 4)], ids=str)
def test_all_tokens_to_one_expert(toy_dir: pathlib.Path, tmp_path: pathlib.Path, shape: MeshShape) -> None:
    """Every token goes to expert 5, and with it to expert 4: on the same of four ranks, or on another of eight."""
    directory, prompts = with_router_bias(toy_dir, tmp_path / "skewed", {5: 200.0, 4: 100.0}), prompts_of(TOY)
    it = engine(directory, shape, expert_parallel=True)
    together = it.prefill(prompts)
    check(directory, prompts, together)
    assert max(tick.expert_rounds for tick in it.last_ticks) >= 2 * len(it._plan.pattern)
    alone = it.prefill(prompts[-1:])[0]
    assert alone.logits.tobytes() == together[-1].logits.tobytes(), "neighbours changed the result"


def test_one_rank_is_the_ordinary_model(toy_dir: pathlib.Path) -> None:
    config = load_config(toy_dir)
    plan, mesh = plan_stages(config.layer_types, 2), make_mesh(MeshShape(2, 2, 1))
    ordinary, parallel = (abstract_model(config, plan, mesh, jnp.bfloat16, True, split) for split in (False, True))
    assert ordinary[0] == parallel[0]
    assert jax.tree.leaves(ordinary[1]) == jax.tree.leaves(parallel[1])


def test_bfloat16_is_no_worse_than_transformers(checkpoint: WriteCheckpoint) -> None:
    case = golden.load("toy")
    it = engine(checkpoint(case.model), MeshShape(1, 1, 4), dtype="bfloat16", expert_parallel=True, chunk_tokens=128)
    ours = np.stack([r.logits for r in it.prefill(case.prompts)]) - case.logits
    theirs = case.logits_bf16 - case.logits
    assert np.abs(ours).max() <= np.abs(theirs).max()
    assert np.square(ours).mean() <= np.square(theirs).mean()


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (MeshShape(1, 1, 8), {"expert_parallel": True}, r"split 12 experts over ulysses=8.*\[1, 2, 3, 4, 6, 12\]"),
        (MeshShape(), {"expert_parallel": "yes"}, "expert_parallel must be True or False, not 'yes'"),
    ],
)
def test_what_cannot_work_is_refused(
    wide_dir: pathlib.Path, shape: MeshShape, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.load(wide_dir, mesh=shape, **options)
