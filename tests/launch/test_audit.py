"""The audit agrees with the formulas, and fails when it should."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from slope_jax import MeshShape
from slope_jax.audit import hlo
from slope_jax.audit.report import Audit, audit, check_balance, check_length, check_memory, check_traffic
from slope_jax.audit.traffic import exchange_key, traffic_rows
from slope_jax.audit.work import Tick, plan_ticks, prompt_work
from slope_jax.execution.spec import TickPrograms
from slope_jax.launch.audit import format_audit, summary_row
from slope_jax.mesh.layout import zigzag
from slope_jax.model.config import FULL, SLIDING, GptOssConfig, load_config
from slope_jax.model.counts import cost
from slope_jax.model.parallel.expert_parallel import ExchangeShape
from slope_jax.model.published import published_config
from slope_jax.model.stage_plan import plan_stages

ROOT = pathlib.Path(__file__).parents[2]
CUBE = MeshShape(2, 2, 2)
BLOCKS: dict[str, Any] = {"block_q": 8, "block_kv": 16, "page_tokens": 8, "chunk_tokens": 64}


@pytest.fixture(scope="module")
def config(toy8_dir: pathlib.Path) -> GptOssConfig:
    """Four sliding and four full layers, so a stage of two repeats its unit of two twice."""
    return load_config(toy8_dir)


@pytest.fixture(scope="module")
def cube(config: GptOssConfig) -> Audit:
    return audit(config, CUBE, num_tokens=256, ring_pass="kv", **BLOCKS)


def test_nothing_fails_on_a_cube(config: GptOssConfig, cube: Audit) -> None:
    assert cube.failures == ()
    for row in cube.memory:
        assert row.formula in (None, row.num_bytes)
    for exchange in cube.traffic:
        assert exchange.num_bytes == exchange.formula > 0
        assert exchange.axes == exchange.formula_axes != ()
    assert [len(cube.ticks), cube.idle] == [5, 1 / 5]


def test_what_a_cube_sends_counted_by_hand(config: GptOssConfig, cube: Audit) -> None:
    """4 chunks of 64 tokens in 5 ticks, on each device 16 slots of 64 numbers of 4 heads; two layers of each kind."""
    rows = {dataclasses.astuple(row.key): row for row in cube.traffic}
    rounds = sum(tick.rounds for tick in cube.ticks)
    assert [tick.rounds for tick in cube.ticks] == [1, 2, 3, 4, 4]
    heads, kv = (8 + 2 * 2) * 32 * 2, 2 * 32 * 2  # bytes of a token: q, k and v in all heads; k and v on a device
    for kind in (SLIDING, FULL):
        assert rows["project_in", "all_to_all", kind].num_bytes == 5 * 2 * 16 * heads // 2
        assert rows["project_out", "all_to_all", kind].num_bytes == 5 * 2 * 16 * 8 * 32 * 2 // 2
    assert rows["pass_kv", "ppermute", FULL].num_bytes == rounds * 2 * 32 * (kv + 4)
    assert rows["window_attention", "ppermute", SLIDING].num_bytes == 5 * 2 * 2 * 7 * kv
    assert rows["hand_off", "ppermute", ""].num_bytes == 5 * 16 * 96 * 4
    assert rows["pass_kv", "ppermute", FULL].axes == ("ring",)
    assert rows["hand_off", "ppermute", ""].axes == ("pp",)
    assert rows["unembed", "psum", ""].axes == ("pp", "ring", "ulysses")


def test_work_of_a_ring_and_packed_experts(config: GptOssConfig) -> None:
    options = {**BLOCKS, "block_kv": 8, "expert_weights": "mxfp4", "expert_parallel": True}
    found = audit(config, MeshShape(1, 4, 2), num_tokens=320, **options)
    assert found.failures == ()
    assert [tick.ring_pass for tick in found.ticks] == ["kv", "kv", "kv", "kv", "kv"]
    parts = {row.part: row.num_bytes for row in found.memory}
    kernels = 8 * 4 * 3 * 96 * 64 * 17 // 32  # layers, half the experts, three matrices, half a byte and a 32nd of one
    assert parts["weights: experts"] == kernels + 8 * 4 * (2 * 64 + 96) * 4
    sent = {row.key.operation: row for row in found.traffic if row.key.scope == "experts" and row.key.layer == FULL}
    # Four full layers in five ticks: the number of rounds, and two exchanges of rows with one other rank.
    assert [sent["psum"].count, sent["all_to_all"].count] == [20, 40]
    # A bucket of 120 tokens is the smallest in which a short chunk has room on any of 4 ring ranks.
    least = ExchangeShape.of(config, 120 // 8, 2, "bfloat16").least_bytes
    assert found.random_expert_rounds is not None
    assert 1 <= found.random_expert_rounds <= 2
    assert 20 * least < sent["all_to_all"].num_bytes < 20 * 1.3 * least
    assert found.work.rows.sum() == 320
    assert found.work.products.shape == (1, 4)
    needed = found.work.needed_attention_operations
    assert needed == 4 * 8 * 32 * 4 * (320 * 321 // 2 + 320 * 8 - 8 * 7 // 2) / 8
    assert needed < found.work.attention_operations.mean() < 3 * needed
    assert 1 <= found.work.attention_balance < 1.05
    text = format_audit(found)
    assert "all passed" in text
    json.dumps(summary_row("toy", MeshShape(1, 4, 2), found))


@pytest.mark.parametrize(("form", "bytes_of_a_value"), [("psum", 2 * 4 / 2), ("tree", 2.0)])
def test_sums_of_tensor_parallelism(config: GptOssConfig, form: str, bytes_of_a_value: float) -> None:
    """On two ranks: half of 2 x 4 bytes by a ring of float32; twice the half of bfloat16."""
    shape = MeshShape(1, 2, 2)
    found = audit(config, shape, num_tokens=128, tensor_parallel=True, all_reduce=form, **BLOCKS)
    assert found.failures == ()
    for exchange in found.traffic:
        assert exchange.num_bytes == exchange.formula > 0
        assert exchange.axes == exchange.formula_axes != ()
    operations = {"psum": ["psum"], "tree": ["all_to_all", "all_gather"]}[form]
    rows = [row for row in found.traffic if row.key.scope in ("project_in", "project_out", "experts")]
    assert {row.key.operation for row in rows} == set(operations)
    # Two chunks of 64 tokens, 32 on a ring rank, in eight layers of 96 numbers, after attention and after experts.
    assert sum(row.num_bytes for row in rows) == 2 * 8 * 2 * 32 * 96 * bytes_of_a_value
    assert all(row.axes == ("ulysses",) for row in rows)
    assert found.work.rows.sum() == 128
    assert found.work.expert_operations.shape == (1, 2, 1)
    whole = cost.prompt_operations(config, 128).experts
    np.testing.assert_allclose(2 * found.work.expert_operations.sum(), whole)
    parts = {row.part: row.num_bytes for row in found.memory}
    assert parts["weights: experts"] == 8 * 8 * ((96 * 3 * 32) * 2 + (2 * 32 + 96) * 4)
    assert "all passed" in format_audit(found)


def programs_of(config: GptOssConfig, shape: MeshShape) -> TickPrograms:
    plan = plan_stages(config.layer_types, shape.pp)
    options: dict[str, Any] = {"dtype": "bfloat16", "packed_experts": False, "expert_parallel": False}
    return TickPrograms.of(config, plan, shape, kv_cache_tokens=256, ring_pass="auto", **options, **BLOCKS)


def test_a_prompt_too_short_for_the_ring_is_out_of_balance(config: GptOssConfig) -> None:
    programs = programs_of(config, MeshShape(1, 4, 1))
    chunks = [(0, zigzag(0, 20, 4, config.sliding_window))]
    work = prompt_work(programs, chunks, plan_ticks(programs, chunks))
    assert [work.attention_balance, work.expert_balance] == [4.0, 4.0]
    assert [f.split(":")[0] for f in check_balance(work)] == ["attention", "experts"]
    assert check_balance(dataclasses.replace(work, attention_balance=1.05, expert_balance=1.0)) == []


@pytest.mark.parametrize(("factor", "fails"), [(0.97, True), (0.99, False), (1.01, False), (1.03, True)])
def test_bytes_that_are_not_those_of_the_formula_fail(cube: Audit, factor: float, fails: bool) -> None:
    """Each kind of exchange and each part of the memory on its own, however small it is."""
    for i, row in enumerate(cube.traffic):
        rows = list(cube.traffic)
        rows[i] = dataclasses.replace(row, num_bytes=round(row.num_bytes * factor))
        failures = check_traffic(rows)
        assert len(failures) == fails
        assert all(row.key.operation in failure for failure in failures)
    for i, part in enumerate(cube.memory):
        parts = list(cube.memory)
        parts[i] = dataclasses.replace(part, num_bytes=round(part.num_bytes * factor))
        assert len(check_memory(parts)) == (fails and part.formula is not None)


def test_exchanges_that_are_missing_or_take_another_way_fail(cube: Audit) -> None:
    row = cube.traffic[-1]
    assert len(check_traffic([dataclasses.replace(row, num_bytes=0, axes=())])) == 2
    assert len(check_traffic([dataclasses.replace(row, formula=0, formula_axes=())])) == 2
    (failure,) = check_traffic([dataclasses.replace(row, axes=("pp",))])
    assert "over the axes ('pp',)" in failure


def exchange(op_name: str, *around: hlo.Loop | hlo.Branch, operand_bytes: int = 8) -> hlo.Exchange:
    return hlo.Exchange(operation="psum", operand_bytes=operand_bytes, groups=((0, 1),), op_name=op_name, around=around)


def test_bytes_of_window_layers_that_depend_on_the_length_fail(config: GptOssConfig) -> None:
    programs = programs_of(config, MeshShape(1, 2, 1))
    in_ring = hlo.Loop(op_name=f"jit(f)/{FULL}/pass_kv/while", trip_count=None)
    repeated = hlo.Loop(op_name="jit(f)/while", trip_count=3)
    same = [exchange("window_attention/psum", repeated), exchange(f"{FULL}/pass_kv/psum", in_ring)]
    assert check_length(programs, 64, (same, same)) == []
    for found in (
        (same, [exchange("window_attention/psum", repeated, operand_bytes=16)]),
        (same, [*same, exchange(f"{SLIDING}/project_in/psum")]),
    ):
        (failure,) = check_length(programs, 64, found)
        assert "of window layers" in failure
        assert "twice as long" in failure


def test_exchanges_that_are_not_part_of_the_design_are_refused(config: GptOssConfig) -> None:
    programs = programs_of(config, MeshShape(1, 2, 1))
    tick = Tick(bucket=64, ring_pass="kv", rounds=2, chunks=(0,))
    assert exchange_key(exchange(f"jit(f)/{SLIDING}/experts/psum")).layer == SLIDING
    branch = hlo.Branch(op_name=f"jit(f)/{FULL}", index=0)
    loop = hlo.Loop(op_name="jit(f)/while", trip_count=None)
    in_ring = hlo.Loop(op_name=f"jit(f)/{FULL}/pass_kv/while", trip_count=None)
    for found, message in (
        (exchange("jit(f)/while/psum"), r"outside the scopes of a tick: psum in jit\(f\)/while/psum"),
        (exchange("jit(f)/embed", branch), "in a branch"),
        (exchange("jit(f)/embed", loop), "loop of unknown length"),
        (exchange("jit(f)/window_attention", in_ring), "loop of unknown length"),
    ):
        with pytest.raises(ValueError, match=message):
            traffic_rows(programs, {64: [found]}, [tick])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_tokens": 2049}, "2049 tokens.*1 to 2048"),
        ({"expert_weights": "int8"}, "expert_weights='int8'"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"tensor_parallel": True, "all_reduce": "star"}, "all_reduce='star'"),
        ({"tensor_parallel": True, "expert_parallel": True}, "both divide the experts"),
        ({"shape": MeshShape(1, 1, 3)}, "ulysses=3"),
        ({"shape": MeshShape(4, 4, 1)}, "needs 16 devices"),
        ({"shape": MeshShape(9, 1, 1)}, "pp=9"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
)
def test_what_no_engine_could_run_is_refused(config: GptOssConfig, changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"shape": MeshShape(), "num_tokens": 64, **BLOCKS, **changes}
    with pytest.raises(ValueError, match=message):
        audit(config, arguments.pop("shape"), **arguments)


def run_program(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slope_jax.launch.audit", *args]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment)


def test_the_program_on_the_published_model(tmp_path: pathlib.Path) -> None:
    """A full-size model on 8 virtual devices, of which no weight is ever made."""
    done = run_program(
        "--config=gpt-oss-20b",
        "--pp=2",
        "--ring=2",
        "--ulysses=2",
        "--tokens=32768",
        "--json",
        "--expert_weights=mxfp4",
    )
    assert done.returncode == 0, done.stderr
    assert "all passed" in done.stdout
    row = json.loads(done.stdout.splitlines()[-1])
    small = published_config("gpt-oss-20b")
    assert row["mesh"] == "2x2x2"
    weights = cost.checkpoint_bytes(small, packed=True)
    layers = (weights.attention + weights.router + weights.experts) / 2
    np.testing.assert_allclose(row["weights_gb"], (layers + (weights.embedding + weights.unembedding) / 8) / 1e9, 0.01)
    assert row["ticks"] == 9
    assert row["peak_bytes"] < 2 << 30


def test_the_program_fails_and_refuses(toy8_dir: pathlib.Path) -> None:
    config = f"--config={toy8_dir / 'config.json'}"
    done = run_program(config, "--ring=2", "--tokens=20")
    assert done.returncode == 1, done.stderr
    assert "FAILED: attention" in done.stdout
    done = run_program("--config=gpt-oss-7b")
    assert done.returncode == 2
    assert "gpt-oss-7b" in done.stderr
