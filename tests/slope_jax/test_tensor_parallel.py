"""The invariance law with tensor parallelism: results do not depend on what the ulysses axis divides."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from slope_jax import Engine, MeshShape
from slope_jax.execution.spec import TickPrograms
from slope_jax.mesh.axes import make_mesh
from slope_jax.model.config import load_config
from slope_jax.model.counts import cost
from slope_jax.model.gpt_oss import abstract_model
from slope_jax.model.parallel.tensor_split import TensorSplit
from slope_jax.model.stage_plan import plan_stages
from tests.oracle import golden
from tests.oracle.checkpoints import TOY, TOY8, TOY_IRREGULAR, WIDE, TinyModel, WriteCheckpoint
from tests.slope_jax.engines import check, engine, steady_prompt

LENGTHS = (33, 40, 150)  # in one bucket, so that one program is compiled


def prompts_of(directory: pathlib.Path, model: TinyModel, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    return [list(steady_prompt(directory, model, n, 0)) for n in lengths]


@pytest.mark.parametrize(
    ("model", "shape", "form", "experts", "ring_pass"),
    [
        (TOY8, MeshShape(1, 1, 2), "tree", "bfloat16", "auto"),
        (TOY8, MeshShape(2, 2, 2), "flat", "bfloat16", "kv"),
        (TOY_IRREGULAR, MeshShape(2, 1, 2), "flat", "mxfp4", "auto"),  # stages with empty slots
        # Four ranks have each KV head, and six no part of an expert.
        (TOY, MeshShape(1, 1, 8), "psum", "mxfp4", "auto"),
        (WIDE, MeshShape(1, 2, 4), "tree", "bfloat16", "kv"),  # five blocks of experts on four ranks
    ],
    ids=lambda x: str(x) if isinstance(x, MeshShape | str) else "",
)
def test_every_mesh_and_form(
    checkpoint: WriteCheckpoint, model: TinyModel, shape: MeshShape, form: str, experts: str, ring_pass: str
) -> None:
    """Several chunks, several prompts; logits, the KV that is handed off, and the memory report."""
    directory = checkpoint(model)
    prompts = prompts_of(directory, model)
    it = engine(directory, shape, tensor_parallel=True, all_reduce=form, expert_weights=experts, ring_pass=ring_pass)
    check(directory, prompts, it.prefill(prompts))
    packed, split = experts == "mxfp4", TensorSplit.of(shape.ulysses, form)
    weights = cost.device_weight_bytes(it.config, it._plan, shape, "float32", packed=packed, split=split)
    assert it.memory().weights == weights


def test_short_prompts_and_chunks(checkpoint: WriteCheckpoint) -> None:
    """With queries going round the ring."""
    directory = checkpoint(TOY8)
    prompts = prompts_of(directory, TOY8, (1, 2, 9, 40))
    options: dict[str, Any] = {"all_reduce": "tree", "expert_weights": "mxfp4", "ring_pass": "q", "chunk_tokens": 16}
    it = engine(directory, MeshShape(1, 2, 2), tensor_parallel=True, kv_cache_tokens=64, **options)
    check(directory, prompts, it.prefill(prompts))


def test_one_rank_is_the_ordinary_model(toy_dir: pathlib.Path) -> None:
    config = load_config(toy_dir)
    plan, mesh = plan_stages(config.layer_types, 2), make_mesh(MeshShape(2, 2, 1))
    whole, divided = (
        abstract_model(config, plan, mesh, jnp.bfloat16, True, split=TensorSplit.of(1, form)) for form in (None, "tree")
    )
    assert whole[0] == divided[0]
    assert jax.tree.leaves(whole[1]) == jax.tree.leaves(divided[1])


def test_bfloat16_is_no_worse_than_transformers(checkpoint: WriteCheckpoint) -> None:
    """With the form that rounds most."""
    case = golden.load("toy")
    it = engine(
        checkpoint(case.model),
        MeshShape(1, 1, 4),
        dtype="bfloat16",
        tensor_parallel=True,
        all_reduce="tree",
        chunk_tokens=128,
    )
    ours = np.stack([r.logits for r in it.prefill(case.prompts)]) - case.logits
    theirs = case.logits_bf16 - case.logits
    assert np.abs(ours).max() <= np.abs(theirs).max()
    assert np.square(ours).mean() <= np.square(theirs).mean()


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (MeshShape(1, 1, 2), {"expert_parallel": True}, "tensor_parallel and expert_parallel both divide the experts"),
        (MeshShape(1, 1, 2), {"all_reduce": "star"}, r"all_reduce='star' is not supported.*psum.*flat.*tree"),
        (MeshShape(1, 1, 3), {}, "ulysses=3 does not divide the 8 query heads"),
        (MeshShape(), {"tensor_parallel": "yes"}, "tensor_parallel must be True or False, not 'yes'"),
        (MeshShape(), {"tensor_parallel": False, "all_reduce": "flat"}, "all_reduce='flat' is of no use without"),
    ],
)
def test_what_cannot_work_is_refused(
    toy_dir: pathlib.Path, shape: MeshShape, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine.load(toy_dir, mesh=shape, **{"tensor_parallel": True, **options})


def test_programs_of_every_form_are_kept_apart(toy_dir: pathlib.Path) -> None:
    config, shape = load_config(toy_dir), MeshShape(1, 1, 2)
    options: dict[str, Any] = {"dtype": "float32", "packed_experts": True, "expert_parallel": False}
    options |= {"chunk_tokens": 64, "kv_cache_tokens": 64, "block_q": 8, "block_kv": 16, "page_tokens": 8}
    plan = plan_stages(config.layer_types, 1)
    forms = (None, "psum", "flat", "tree")
    made = [TickPrograms.of(config, plan, shape, ring_pass="kv", all_reduce=form, **options) for form in forms]
    assert len({repr(programs) for programs in made}) == 4
    assert [programs.rows(64) for programs in made] == [32, 64, 64, 64]


def test_a_split_that_no_mesh_has_is_refused(toy_dir: pathlib.Path) -> None:
    config = load_config(toy_dir)
    plan, mesh = plan_stages(config.layer_types, 1), make_mesh(MeshShape(1, 1, 4))
    for split, parallel, message in (
        (TensorSplit(ranks=2), False, "over 2 ranks needs as many of ulysses=4"),
        (TensorSplit(ranks=4), True, "tensor parallelism and expert parallelism"),
    ):
        with pytest.raises(ValueError, match=message):
            abstract_model(config, plan, mesh, jnp.bfloat16, True, parallel, split)
