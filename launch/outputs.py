"""The files that the prefill program writes: `results.jsonl`, and a folder with the KV of each prompt."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import urllib.parse
from collections.abc import Sequence
from typing import Any

from slope_jax.model.tokenizer import Tokenizer
from slope_jax.result import PrefillResult
from slope_jax.sampling import top_logprobs

RESULTS_FILE = "results.jsonl"
TOP_LOGPROBS = 5


def describe_result(result: PrefillResult, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The fields of a result's line, except for its KV."""

    def text(token_id: int) -> str | None:
        return tokenizer.decode([token_id]) if tokenizer else None

    return {
        "id": result.request_id,
        "num_tokens": result.num_tokens,
        "token_id": result.token_id,
        "text": text(result.token_id),
        "top_logprobs": [
            {"token_id": top.token_id, "text": text(top.token_id), "logprob": top.logprob}
            for top in top_logprobs(result.logits, TOP_LOGPROBS)
        ],
        "ttft_s": result.ttft_s,
    }


def save_kv(result: PrefillResult, output_dir: pathlib.Path) -> dict[str, str]:
    """Saves a result's KV under the output folder; returns the field `kv` or `error`."""
    folder = output_dir.resolve() / "kv" / folder_name(result.request_id)
    try:
        return {"kv": str(result.kv.save(folder, overwrite=True))}
    except OSError as error:
        return {"error": f"the KV could not be saved: {error}"}


def folder_name(request_id: str) -> str:
    """A file name for a request id, whatever characters it has; different ids have different names."""
    name = urllib.parse.quote(request_id, safe="").replace(".", "%2E")
    return name if len(name) <= 200 else "sha256-" + hashlib.sha256(request_id.encode()).hexdigest()


def write_results(path: pathlib.Path, records: Sequence[dict[str, Any]]) -> None:
    """Writes one JSON object per line; the file takes its name when it is complete."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    part.replace(path)
