"""Published measurements, as samples for the planner.

`python -m tests.slope_jax.planner.published` prints the errors of all of them.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

from slope_jax.mesh.axes import MeshShape
from slope_jax.model.config import GptOssConfig
from slope_jax.model.published import published_config
from slope_jax.planner import Cluster, Layout, predict
from slope_jax.planner.fit import Fit, Sample, fit
from slope_jax.planner.layout import SEQUENCE, TENSOR
from slope_jax.planner.models import sizes_of
from slope_jax.planner.operations import OperationTimes
from slope_jax.planner.schedule import one_pass

FOLDER = pathlib.Path(__file__).parent
# Four numbers: products, network, the time of a ring step beside its bytes, and how much of a transfer is not hidden.
# Attention is what the paper measured alone.
META_GROUPS = {
    "products": ("dense", "experts"),
    "network": ("network",),
    "ring step": ("ring_step",),
    "exposed": ("ring_exposed",),
}
META_LIMITS = {"exposed": (1e-3, 2.0)}  # of 0.5, at which the file starts
LEAST_TOKENS = 6400  # of the pass-KV rows that count; below, small products and a floor of a second decide
_CHUNK = 8192  # of vLLM


def read(name: str) -> dict[str, Any]:
    """A fixture."""
    return dict(json.loads((FOLDER / name).read_text(encoding="utf-8")))


def meta_samples(*, all_rows: bool = False) -> list[Sample]:
    """The TTFTs of arXiv 2411.01783, and its pass-KV rows; those below `LEAST_TOKENS` when `all_rows`."""
    tables = read("meta_tables.json")
    config = sizes_of(tables["llama_405b"])
    rows = [*tables["ttft"], *(row for row in tables["pass_kv"] if all_rows or row["tokens"] >= LEAST_TOKENS)]
    return [
        Sample(
            name=f"table {row['table']}, CP{row['ring']}, {row['tokens']} tokens after {row.get('cached', 0)}",
            seconds=row["seconds"],
            predict=functools.partial(_meta_ttft, config, row["ring"], row.get("cached", 0), row["tokens"]),
            is_fitted=row["fit"],
        )
        for row in rows
    ]


def _meta_ttft(config: GptOssConfig, ring: int, cached: int, tokens: int, cluster: Cluster) -> float:
    shape = MeshShape(ring=ring, ulysses=8)
    layout = Layout(shape=shape, chunk_tokens=tokens, split=TENSOR, expert_weights="bfloat16")
    return float(OperationTimes(config, cluster, layout)(one_pass(tokens, cached, ring)).ticks().sum())


def meta_fit(*, all_rows: bool = False) -> Fit:
    """Four numbers, fitted to a third of the samples."""
    cluster = Cluster.load(FOLDER / "meta_gtt.toml", nodes=16)
    return fit(cluster, META_GROUPS, meta_samples(all_rows=all_rows), limits=META_LIMITS)


def served_errors() -> list[tuple[dict[str, Any], float, float]]:
    """Of every served measurement: the row, predicted over measured less one, and the same without an engine."""
    config = published_config("gpt-oss-120b")
    found = []
    for row in read("served.json")["rows"]:
        cluster = Cluster.load(row["machine"]).scaled({"unpacking": 0.0})  # their kernels unpack in registers
        devices = row["devices"]
        layout = Layout(
            shape=MeshShape(ulysses=devices),
            chunk_tokens=min(row["tokens"], _CHUNK),
            split=TENSOR if devices > 1 else SEQUENCE,
        )
        seconds = predict(config, cluster, layout, row["tokens"]).ttft_s
        bare = seconds / cluster.curve("engine")()
        found.append((row, seconds / row["seconds"] - 1, bare / row["seconds"] - 1))
    return found


def main() -> None:
    """Prints all errors."""
    found = meta_fit(all_rows=True)
    print("arXiv 2411.01783:", ", ".join(f"{name} x {factor:.3f}" for name, factor in found.factors.items()))
    for name, error in found.errors.items():
        print(f"  {name:50} {error:+7.1%}  {'fitted' if name in found.fitted else ''}")
    counted = meta_fit()
    for title, names in (("all", None), ("fitted", counted.fitted), ("test", counted.tested)):
        print(f"  {title}: median {counted.median_error(names):.1%}, largest {counted.largest_error(names):.1%}")
    print("served gpt-oss-120b, with the engine's factor and without:")
    for row, error, bare in served_errors():
        name = f"{row['machine']} x {row['devices']}, {row['tokens']} tokens, {row['seconds']} s"
        print(f"  {name:50} {error:+7.1%} {bare:+7.1%}  {'fitted' if row['fit'] else ''}")


if __name__ == "__main__":
    main()
