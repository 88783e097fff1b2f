"""The table of results: columns line up whatever the ids and tokens hold, and the numbers are those of the results."""

from __future__ import annotations

import math

import numpy as np

from slope_jax.kv.files import KVHeader, LayerSpan, PrefillKV
from slope_jax.launch.tables import format_results
from slope_jax.result import PrefillResult


def result(request_id: str, tokens: int) -> PrefillResult:
    header = KVHeader(
        model_fingerprint="fp",
        token_ids_sha256="",
        num_tokens=tokens,
        first_token_id=2,
        dtype="bfloat16",
        kv_heads=2,
        head_dim=4,
        layers=(LayerSpan("full_attention", 0, tokens), LayerSpan("sliding_attention", tokens - 1, 1)),
    )

    def fetch(layer: int) -> tuple[int, np.ndarray, np.ndarray]:
        raise AssertionError(f"the table read layer {layer}")

    return PrefillResult(
        request_id=request_id,
        num_tokens=tokens,
        token_id=2,
        logits=np.array([0, 1, 3], np.float32),
        ttft_s=0.5,
        kv=PrefillKV(header, fetch),
    )


def test_the_table_shows_the_numbers_of_the_results() -> None:
    table = format_results([result("a", 100), result("漢\n" + "x" * 40, 7)], ["out/a", "out/b"], None)
    heading, first, second = table.splitlines()
    probability = math.exp(3) / (1 + math.exp(1) + math.exp(3))
    assert first.split() == [
        "a",
        "100",
        "0.500",
        "200",
        "2",
        "-",
        f"{probability:.4f}",
        str(101 * 2 * 4 * 2 * 2),
        "out/a",
    ]
    assert second.split()[0] == "漢\N{REPLACEMENT CHARACTER}" + "x" * 19 + "..."
    assert second.split()[1:4] == ["7", "0.500", "14"]
    assert heading.index("KV bytes") + len("KV bytes") == first.index(" out/a") - 1
    # The wide character takes two columns, so the line has one character fewer before the last column.
    assert heading.rindex("KV") == first.index("out/a") == second.index("out/b") + 1
