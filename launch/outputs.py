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
KV_FOLDER = "kv"
TOP_LOGPROBS = 5


def prepare_output(output_dir: pathlib.Path) -> None:
    """Makes the output folder, and removes the results of an earlier run, so that none are taken for those of this one.

    Raises:
      ValueError: the folder cannot be made or written to.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / RESULTS_FILE).unlink(missing_ok=True)
        (output_dir / KV_FOLDER).mkdir(exist_ok=True)
    except OSError as error:
        raise ValueError(f"the output folder {output_dir} cannot be written to: {error}") from error


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
    folder = output_dir.resolve() / KV_FOLDER / folder_name(result.request_id)
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
