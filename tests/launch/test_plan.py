"""The plan program: tables, JSON, a plot, and clear errors."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys

import pytest
from absl import flags

from slope_jax.launch import plan
from slope_jax.launch.flags import StartError

ROOT = pathlib.Path(__file__).parents[2]


def _run(*arguments: str) -> str:
    """What the program prints."""
    values = flags.FlagValues()
    plan.define_flags(values)
    values(["plan", *arguments])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert plan.run(values) == 0
    return printed.getvalue()


def test_json_and_plot(tmp_path: pathlib.Path) -> None:
    plot = tmp_path / "plan.png"
    text = _run("--nodes=2", "--tokens=8192,16384", "--ttft_slo=1,1", "--format=json", f"--plot={plot}", "--solve")
    answers = json.loads(text)["answers"]
    assert [a["tokens"] for a in answers] == [8192, 16_384]
    best = answers[0]["best"][0]
    assert best["pp"] * best["ring"] * best["ulysses"] * best["replicas"] == 16
    together = sum(best["parts"].values()) + best["bubble_s"]
    assert together == pytest.approx(best["ttft_s"])
    assert {r["change"] for r in answers[0]["requirements"]} >= {"attention and experts", "nodes"}
    assert all(a["reading"]["sources"] for a in answers[0]["assumptions"])
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_explain_shows_one_mesh_in_full() -> None:
    text = _run("--explain=2,2,8", "--tokens=32768", "--splits=sequence")
    for part in ("== 2x2x8, 32,768 tokens ==", "full attention", "bubble", "memory of a device", "it hangs on"):
        assert part in text
    assert "EP" not in text


def test_explain_judges_targets_and_follows_the_flags() -> None:
    flags_of_all = ("--explain=1,4,8", "--tokens=32768,65536", "--ttft_slo=1,0.5", "--splits=expert")
    text = _run(*flags_of_all, "--ring_pass=q", "--expert_weights=mxfp4")
    sections = text.split("== 1x4x8 EP")[1:]
    assert [s.split(" ==")[0] for s in sections] == [
        ", 32,768 tokens, TTFT within 1 s",
        ", 65,536 tokens, TTFT within 0.5 s",
    ]
    rows = [s.splitlines()[2].split() for s in sections]
    assert [row[5:7] for row in rows] == [["mxfp4", "q"]] * 2
    assert int(rows[0][9]) > 0
    assert int(rows[1][9]) == 0


def test_the_table_has_the_baseline_and_what_would_be_needed() -> None:
    text = _run("--nodes=1", "--tokens=16384", "--ttft_slo=0.1", "--solve")
    for part in (
        "TP  1x1x8 TP",
        "No configuration meets the target",
        "to meet 0.1 s, one change",
        "does not fit: 1x",
        "reserve ",
    ):
        assert part in text


def test_a_calibrated_machine_is_kept(tmp_path: pathlib.Path) -> None:
    common = {"kind": "prefill", "model": "mini", "mesh": "1x1x1", "devices": 1, "dtype": "bfloat16", "concurrency": 1}
    common |= {"expert_weights": "bfloat16", "chunk_tokens": 4096, "peak_tflop_per_s": 0.2, "steady": True}
    rows = [common | {"prompt_tokens": n, "ttft_median_s": n / 800} for n in (1024, 4096, 8192)]
    (tmp_path / "bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    machine = tmp_path / "machine.toml"
    common_flags = ["--config=mini", "--nodes=1"]
    text = _run("--cluster=cpu", *common_flags, f"--calibrate={tmp_path / 'bench.jsonl'}", f"--save_cluster={machine}")
    assert [line.split()[-3] for line in text.splitlines()[-3:]] == ["fitted", "fitted", "test"]
    explained = _run(f"--cluster={machine}", *common_flags, "--explain=1,1,1", "--tokens=4096")
    assert "== 1x1x1, 4,096 tokens ==" in explained
    ttft = float(next(line for line in explained.splitlines() if line.startswith("together")).split()[-1])
    error = next(line.split()[-2] for line in text.splitlines() if line.startswith("1x1x1, bfloat16, 4096 tokens"))
    assert ttft == pytest.approx(4096 / 800 * 1e3 * (1 + float(error.rstrip("%")) / 100), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster=mi999"], "'mi999' is neither a machine that is known"),
        (["--nodes=0"], "a cluster needs at least one node, not 0"),
        (["--nodes=2000000"], "a cluster of 2000000 nodes: the planner takes at most 1024"),
        (["--explain=1,1,1", "--tokens=1000"], "1x1x1 sequence, 1,000 tokens: needs"),
        (["--explain=8,8,1"], "--explain: replicas of 8x8x1, 64 devices each, do not use all 32 devices"),
        (["--explain=3,1,1"], "--explain: replicas of 3x1x1, 3 devices each, do not use all 32 devices"),
        (["--explain=1,1,1", "--ttft_slo=1"], "there are 3 lengths of prompts and 1 targets"),
        (["--explain=8,8"], "--explain takes pp,ring,ulysses, not 2 numbers"),
        (["--tokens=1000", "--ttft_slo=-1"], "--ttft_slo: -1 is not positive"),
        (["--tokens=1000,0"], "--tokens: 0 is not positive"),
        (["--tokens=many"], "--tokens: invalid literal"),
        (["--splits=banana"], "--splits=banana: it lists one or more of sequence, expert, tensor"),
        (["--splits="], "--splits=: it lists one or more of"),
        (["--expert_weights=int4"], "--expert_weights=int4: it lists one or more of bfloat16, mxfp4"),
        (["--explain=2,2,8", "--format=json"], "--explain prints a table, and goes neither with --solve"),
        (["--save_cluster=mine.toml"], "--save_cluster is of no use without --calibrate"),
        (["--calibrate=missing.jsonl", "--config=mini"], "missing.jsonl: cannot be read"),
    ],
)
def test_bad_input_gets_a_clear_error(arguments: list[str], message: str) -> None:
    with pytest.raises(StartError) as caught:
        _run(*arguments)
    assert message in str(caught.value)


def test_an_error_ends_the_program_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "slope_jax.launch.plan", "--nodes=0"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 2
    assert "a cluster needs at least one node, not 0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "prefill", "model": "mini"}', "a line has no 'concurrency'"),
        (
            '{"kind": "prefill", "model": "mini", "ttft_median_s": null}',
            "ttft_median_s must be a positive number, not None",
        ),
        ('{"kind": "prefill", "model": "mini", "peak_tflop_per_s": 0}', "peak_tflop_per_s must be a positive number"),
        ('{"kind": "prefill", "model": "tiny"}', "the lines are of tiny, but --config=mini"),
    ],
)
def test_lines_that_do_not_fit_are_refused(tmp_path: pathlib.Path, line: str, message: str) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(line)
    with pytest.raises(StartError) as caught:
        _run(f"--calibrate={path}", "--config=mini", "--cluster=cpu", "--nodes=1")
    assert message in str(caught.value)
