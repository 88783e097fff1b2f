"""Audits a model on a mesh without GPUs and without its weights: memory, exchanges, balance, ticks.

    python -m slope_jax.launch.audit --config=gpt-oss-120b --pp=2 --ring=2 --ulysses=8 --tokens=102400

compiles the programs that the engine would run for one prompt, for as many virtual CPU devices as the mesh has, and
prints what they need and exchange per device, next to what the formulas give.

The exit status is 0 when everything is as it must be; 1 when bytes differ from the formula by more than 2 %, when what
window layers exchange depends on the prompt's length, or when attention or experts are out of balance; 2 when the
program could not start.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from absl import app, flags

from slope_jax.audit.report import Audit, audit
from slope_jax.launch.flags import StartError, define_engine_flags, engine_options, mesh_shape
from slope_jax.mesh import ring_policy
from slope_jax.mesh.all_reduce import PSUM
from slope_jax.mesh.axes import MeshShape
from slope_jax.mesh.processes.distributed import run_program
from slope_jax.model.published import PUBLISHED, find_config


def format_audit(found: Audit) -> str:
    """The report as text: sections with tables, in Markdown."""
    return "\n\n".join(
        [
            "## Memory of a device\n\n" + _memory_table(found),
            "## Largest temporaries\n\n" + _temporaries_table(found),
            "## What a device sends for the whole prompt\n\n" + _traffic_table(found),
            "## Work\n\n" + _work_table(found),
            "## Ticks\n\n" + _describe_ticks(found),
            "## Checks\n\n" + "\n".join([f"FAILED: {failure}" for failure in found.failures] or ["all passed"]),
        ]
    )


def summary_row(name: str, shape: MeshShape, found: Audit) -> dict[str, Any]:
    """The main numbers, for a table of several audits; gigabytes are 10^9 bytes."""
    weights = sum(row.num_bytes for row in found.memory if row.part.startswith("weights"))
    parts = {row.part: row.num_bytes for row in found.memory}
    sent: dict[str, float] = {}
    for row in found.traffic:
        axes = "+".join(row.axes)
        sent[axes] = sent.get(axes, 0) + row.num_bytes / 1e9
    return {
        "config": name,
        "mesh": str(shape),
        "weights_gb": round(weights / 1e9, 2),
        "kv_gb": round(sum(n for part, n in parts.items() if part.startswith("KV")) / 1e9, 3),
        "temporaries_gb": round(parts["temporaries"] / 1e9, 3),
        "sent_gb": {axes: round(n, 2) for axes, n in sent.items()},
        "window_sent_gb": round(sum(r.num_bytes for r in found.traffic if r.key.scope == "window_attention") / 1e9, 4),
        "ticks": len(found.ticks),
        "pass_q_ticks": sum(tick.ring_pass == ring_policy.Q for tick in found.ticks),
        "idle": round(found.idle, 3),
        "attention_balance": round(found.work.attention_balance, 3),
        "expert_balance": round(found.work.expert_balance, 3),
        "random_expert_rounds": found.random_expert_rounds,
        "stage_balance": round(found.work.stage_balance, 3),
        "failures": list(found.failures),
    }


def _memory_table(found: Audit) -> str:
    rows = [(row.part, _gb(row.num_bytes), "" if row.formula is None else _gb(row.formula)) for row in found.memory]
    return _table(("part", "GB", "by formula"), rows)


def _temporaries_table(found: Audit) -> str:
    rows = [
        (f"{t.num_bytes / 1e6:.1f}", t.op_name.removeprefix("jit(device_tick)/") or f"the compiler ({t.instruction})")
        for t in found.temporaries
    ]
    return _table(("MB", "made by"), rows)


def _traffic_table(found: Audit) -> str:
    rows = [
        (
            row.key.layer or "once a tick",
            row.key.scope or "outputs",
            row.key.operation,
            " ".join(row.axes),
            str(row.count),
            _gb(row.num_bytes),
            _gb(row.formula),
        )
        for row in found.traffic
    ]
    total = [sum(getattr(row, name) for row in found.traffic) for name in ("num_bytes", "formula")]
    rows.append(("all", "", "", "", "", _gb(total[0]), _gb(total[1])))
    return _table(("layers", "scope", "operation", "axes", "times", "GB", "by formula"), rows)


def _work_table(found: Audit) -> str:
    work = found.work
    products, operations = work.products, work.attention_operations
    more = operations.mean() / work.needed_attention_operations
    rows = [
        (
            str(stage),
            str(ring),
            str(products[stage, ring]),
            f"{operations[stage, ring] / 1e12:.1f}",
            f"{work.rows[ring].min()}..{work.rows[ring].max()}",
            f"{work.expert_operations[stage, ring].max() / 1e12:.1f}",
        )
        for stage in range(products.shape[0])
        for ring in range(products.shape[1])
    ]
    heads = ("stage", "ring rank", "attention blocks", "TFLOP in them", "tokens of a device", "TFLOP of their experts")
    rounds = found.random_expert_rounds
    exchange = "" if rounds is None else f"; exchanged in {rounds:.1f} rounds a layer when routing is random"
    return (
        f"{_table(heads, rows)}\n\n"
        f"attention: busiest ring rank {work.attention_balance:.4f} of the mean, step by step; {more:.3f} times the "
        "operations that the masks let through\n"
        f"experts: busiest device {work.expert_balance:.4f} of the mean, chunk by chunk{exchange}\n"
        f"stages: busiest {work.stage_balance:.4f} of the mean"
    )


def _describe_ticks(found: Audit) -> str:
    kv = [tick.rounds for tick in found.ticks if tick.ring_pass == ring_policy.KV]
    queries = len(found.ticks) - len(kv)
    buckets = sorted({tick.bucket for tick in found.ticks})
    chunks = 1 + max(chunk for tick in found.ticks for chunk in tick.chunks if chunk is not None)
    passes = f"in {len(kv)} of them keys and values go round the ring, in {min(kv)} to {max(kv)} rounds" if kv else ""
    passes += ", and " * bool(kv and queries) + f"in {queries} queries do" * bool(queries)
    return (
        f"{found.plan.describe()}\n"
        f"{chunks} chunks in buckets of {', '.join(map(str, buckets))} tokens: {len(found.ticks)} ticks; {passes}\n"
        f"{found.idle:.1%} of the stages' ticks are idle"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [list(heads), ["---"] * len(heads), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.4f}"


def run() -> int:
    """The body of the program; returns the exit status."""
    values = flags.FLAGS
    shape = mesh_shape()
    if values.num_processes not in (None, 1):
        raise StartError("the audit runs in one process")
    if values.cpu_devices not in (0, shape.num_devices):
        raise StartError(f"the audit takes as many virtual devices as the mesh {shape} has, not {values.cpu_devices}")
    begin = time.perf_counter()
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", shape.num_devices)
        config = find_config(values.config)
        found = audit(
            config,
            shape,
            num_tokens=values.tokens,
            chunk_tokens=values.chunk_tokens,
            **engine_options(values),
        )
    except ValueError as error:
        raise StartError(str(error)) from error
    seconds, peak = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"# {values.config} on {shape} (pp x ring x ulysses), {values.dtype}, experts in {values.expert_weights}")
    if values.tensor_parallel:
        print(f"\ntensor parallelism over ulysses, all-reduce as {values.all_reduce or PSUM}")
    print(f"\n{values.tokens} tokens in chunks of at most {values.chunk_tokens}\n")
    print(format_audit(found))
    print(f"\nThe audit took {seconds:.0f} s and {peak / 2**30:.2f} GiB.")
    if values.json:
        print(json.dumps(summary_row(values.config, shape, found) | {"seconds": round(seconds), "peak_bytes": peak}))
    return int(bool(found.failures))


def main(argv: Sequence[str]) -> None:
    """Runs the program."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    sys.exit(run_program(run, refusals=(StartError,)))


def define_flags() -> None:
    """Defines the flags of the program, beside those of the mesh."""
    flags.DEFINE_string("config", "gpt-oss-120b", f"{' or '.join(PUBLISHED)}, a checkpoint folder, or a config.json.")
    flags.DEFINE_integer("tokens", 102_400, "Tokens of the prompt.", lower_bound=1)
    define_engine_flags()
    flags.DEFINE_integer("chunk_tokens", 4096, "Longest chunk of a prompt that is processed at once.", lower_bound=1)
    flags.DEFINE_bool("json", False, "Also print the main numbers as one line of JSON.")


if __name__ == "__main__":
    define_flags()
    app.run(main)
