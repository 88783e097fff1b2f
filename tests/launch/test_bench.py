"""The benchmark's rows hold what they say, and what cannot be measured is refused."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import matplotlib.image
import numpy as np
import pytest
from absl import flags

from slope_jax.launch import make_checkpoint as maker
from slope_jax.launch.bench import plot, prefill, program
from slope_jax.launch.bench.timing import Timed
from slope_jax.launch.flags import plot_function
from slope_jax.mesh.axes import MeshShape
from slope_jax.model.counts import cost

TINY = maker.PRESETS["tiny"].config()
ROOT = pathlib.Path(__file__).parents[2]


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slope_jax.launch.bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT)


def test_rows_of_the_tiny_cases(tmp_path: pathlib.Path) -> None:
    """All rows of the table, with their numbers checked against each other and against the counts."""
    done = run_program(
        "--model=tiny",
        "--cases=tiny",
        "--cpu_devices=8",
        "--chunk_tokens=64",
        "--repeats=2",
        "--max_tries=1",
        f"--plot={tmp_path / 'tiny.png'}",
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    cases = prefill.CASES["tiny"]
    engines = [row for row in rows if row["kind"] == "engine"]
    assert [row["mesh"] for row in engines] == ["1x1x1", "2x2x2"]
    for row in engines:
        assert row["warmup_s"] > 0
        assert row["memory"]["total"] > row["memory"]["weights"]["experts"] > 0
    # A chunk that is no longer than the window is on one ring rank, for which all have room.
    assert [row["memory"]["concurrent_tokens"] for row in engines] == [3 * 200, 3 * 2 * 200]
    prefills = [row for row in rows if row["kind"] == "prefill"]
    assert len(prefills) + len(engines) == len(rows)
    assert [(r["mesh"], r["prompt_tokens"], r["concurrency"]) for r in prefills] == [
        (str(case.mesh), case.prompt_tokens, case.concurrency) for case in cases
    ]
    first: dict[tuple[int, int], float] = {}
    for row in prefills:
        assert row["device_kind"] == "cpu"
        assert row["jax"].count(".") == 2
        assert (row["model"], row["dtype"], row["expert_weights"]) == ("tiny", "bfloat16", "bfloat16")
        assert (row["parallelism"], row["all_reduce"]) == ("context", None)
        chunks = -(-row["prompt_tokens"] // 64) * row["concurrency"]
        assert row["ticks"] == chunks + int(row["mesh"][0]) - 1
        total = row["concurrency"] * cost.prompt_operations(TINY, row["prompt_tokens"]).total
        assert sum(row["operations"].values()) == total
        np.testing.assert_allclose(row["tflop_per_s"], total / row["batch_s"] / 1e12)
        np.testing.assert_allclose(row["tokens_per_s"], row["concurrency"] * row["prompt_tokens"] / row["batch_s"])
        assert 0 < row["ttft_median_s"] <= row["ttft_p99_s"]
        assert 0 < row["host_ms_per_tick"] <= row["host_ms_per_tick_max"]
        assert 0 < row["share_of_peak"] < 1
        assert (row["repeats"], row["tries"]) == (2, 2)
        share = first.setdefault((row["prompt_tokens"], row["concurrency"]), row["share_of_peak"])
        np.testing.assert_allclose(row["relative_time"], share / row["share_of_peak"])
    picture = matplotlib.image.imread(tmp_path / "tiny.png")
    assert picture.shape[0] > 300
    assert picture.std() > 0.05


def test_context_and_tensor_parallelism_are_measured_on_the_same_mesh(tmp_path: pathlib.Path) -> None:
    mesh = MeshShape(1, 1, 2)
    settings = program.Settings(
        model="tiny",
        num_layers=1,
        meshes=(mesh,),
        cases=prefill.product_of((mesh,), (30,), (1,)),
        expert_weights=("bfloat16",),
        parallelism=("context", "tensor"),
        all_reduce="tree",
        options={"dtype": "bfloat16", "chunk_tokens": 16},
        prefill=True,
        operations=False,
        repeats=1,
        max_tries=1,
    )
    rows = list(program.measure(settings))
    assert [(r["kind"], r["mesh"], r["parallelism"], r["all_reduce"]) for r in rows] == [
        (kind, "1x1x2", *how) for how in (("context", None), ("tensor", "tree")) for kind in ("engine", "prefill")
    ]
    whole, divided = (row["memory"]["weights"] for row in rows if row["kind"] == "engine")
    assert 2 / 3 < divided["experts"] / whole["experts"] < 0.68  # three blocks on two ranks: two on each
    context, tensor = (row for row in rows if row["kind"] == "prefill")
    np.testing.assert_allclose(tensor["relative_time"], context["share_of_peak"] / tensor["share_of_peak"])
    labels = [style["label"] for style in plot._styles([context, tensor]).values()]
    assert [label.split(", ")[-1] for label in labels] == ["context parallel", "tensor parallel"]
    plot.plot(rows, str(tmp_path / "both.png"))
    assert matplotlib.image.imread(tmp_path / "both.png").std() > 0.05


def test_rows_of_one_prompt_are_those_of_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates and shares from given times: a batch of 3 prompts that took 2 s beside a peak of 1e9, then 4 s at 2e9."""

    class FakeResult:
        def __init__(self, ttft_s: float):
            self.ttft_s = ttft_s

    class FakeTick:
        host_s, host_wait_s, bucket = 0.002, 0.005, 64

    class FakeEngine:
        config, chunk_tokens, last_ticks = TINY, 64, (FakeTick(), FakeTick())

        def prefill(self, prompts: list[np.ndarray]) -> list[FakeResult]:
            assert [len(p) for p in prompts] == [50, 50, 50]
            assert not (prompts[0] == prompts[1]).all()
            return [FakeResult(t) for t in (0.1, 0.2, 0.3)]

    times = iter([(2.0, 1e9), (4.0, 2e9)])

    def fake_timed(function: Any, peak: Any, max_tries: int) -> Any:
        seconds, rate = next(times)
        return Timed(value=function(), seconds=seconds, peak=rate, tries=1, is_steady=rate == 1e9)

    monkeypatch.setattr(prefill, "timed", fake_timed)
    case = prefill.PrefillCase(mesh=MeshShape(), prompt_tokens=50, concurrency=3)
    row = prefill.prefill_row(FakeEngine(), case, 2, lambda: 0.0, 1)  # type: ignore[arg-type]
    total = 3 * cost.prompt_operations(TINY, 50).total
    assert row["batch_s"] == 3.0
    np.testing.assert_allclose(row["share_of_peak"], (total / 2e9 + total / 8e9) / 2)
    assert (row["ttft_median_s"], row["ttft_p99_s"]) == (0.2, 0.3)
    assert (row["host_ms_per_tick"], row["host_wait_ms_per_tick"]) == (2.0, 5.0)
    assert row["steady"] is False


def test_a_second_start_finds_the_programs_of_the_first() -> None:
    done = run_program("--model=tiny", "--startup", "--chunk_tokens=16", "--prompt_tokens=16")
    assert done.returncode == 0, done.stderr
    (row,) = (json.loads(line) for line in done.stdout.splitlines())
    assert row["kind"] == "startup"
    assert row["second_warmup_s"] < row["first_warmup_s"] / 1.5
    np.testing.assert_allclose(row["warmup_ratio"], row["first_warmup_s"] / row["second_warmup_s"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: program.open_model("nothing", None),
            r"'nothing' is neither a model \(demo, mini, tiny, gpt.* a folder",
        ),
        (lambda: program.open_model("tiny", 5), r"num_layers must be in 1\.\.4 for tiny, not 5"),
        (lambda: program.open_model("/", 5), "/ is a checkpoint, of which all layers are used"),
        (lambda: program.parse_mesh("2x2"), "'2x2' is not a mesh"),
        (lambda: program.parse_mesh("2x2x0"), "ulysses.*0"),
        (lambda: program.parse_options(["chunk"]), "--option='chunk' is not of the form name=value"),
        (lambda: program.parse_options(["mesh=1"]), "mesh is not one of block_kv, block_q"),
        (lambda: list(program.read_rows("/nowhere.jsonl")), "/nowhere.jsonl: cannot be read"),
        (lambda: plot.plot([{"kind": "engine"}], "x.png"), "no prefill"),
    ],
)
def test_what_cannot_be_measured_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--parallelism=context,pipeline"], "--parallelism=context,pipeline: it lists one or more of context, tensor"),
        (["--expert_weights="], "--expert_weights=: it lists one or more of bfloat16, mxfp4"),
        (["--prompt_tokens=512,many"], "--prompt_tokens: invalid literal"),
        (["--prompt_tokens=512,0"], "--prompt_tokens: 0 is not positive"),
        (["--prompt_tokens=512,9999999"], "a prompt of 9999999 tokens: the model takes at most"),
        (["--concurrency="], "--prompt_tokens and --concurrency need a number each"),
        (["--meshes=1x1x1,1x1x64"], "ulysses=64"),
        (["--meshes=1x1x1,1x2x1"], "needs 2 devices, but there are 1"),
        (["--noprefill", "--plot=x.png"], "--plot draws prefills"),
        (
            ["--option=expert_parallel=True", "--parallelism=context,tensor"],
            "tensor_parallel and expert_parallel both divide the experts",
        ),
        (["--all_reduce=tree"], "--all_reduce=tree is of no use without --parallelism=tensor"),
        (["--option=tensor_parallel=True"], "tensor_parallel is not one of"),
        (["--option=machine=3"], "machine is not one of"),
        (["--option=kv_cache_tokens=100"], "a prompt of 8192 tokens does not fit into kv_cache_tokens=100"),
    ],
)
def test_flags_that_make_no_sense_are_refused_before_anything_runs(given: list[str], message: str) -> None:
    values = flags.FlagValues()
    program.define_flags(values)
    values(["bench", "--model=tiny", "--meshes=1x1x1", *given])
    config = maker.PRESETS["tiny"].config()
    with pytest.raises(ValueError, match=re.escape(message)):
        program.check(config, program.read_settings(values), jax.devices()[:1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--option=wings=2"], "wings is not one of"),
        (["--meshes=1x1x1,1x2x1"], "needs 2 devices, but there are 1"),
        (["--plot=/nowhere/x.png"], "not the name of a .png file in a folder that exists"),
        (["--rows=x.jsonl"], "--rows is of no use without --plot"),
    ],
)
def test_a_refusal_ends_the_program_with_the_reason(given: list[str], message: str) -> None:
    done = run_program("--model=tiny", *given)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("line", ["[1]", "{}", "{"])
def test_rows_of_another_program_are_refused(tmp_path: pathlib.Path, line: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"kind": "engine"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2: not a"):
        list(program.read_rows(str(tmp_path / "rows.jsonl")))


def test_a_plot_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "slope_jax.launch.bench.plot", None)
    with pytest.raises(ValueError, match=r"--plot needs matplotlib \(the extra bench\)"):
        plot_function("slope_jax.launch.bench.plot")


def test_options_are_python_values_or_texts() -> None:
    texts = ["memory_budget=4GiB", "page_tokens=32", "block_q=None", "kv_cache_tokens='5'"]
    assert program.parse_options(texts) == {
        "memory_budget": "4GiB",
        "page_tokens": 32,
        "block_q": None,
        "kv_cache_tokens": "5",
    }
