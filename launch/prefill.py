"""Prefills the prompts of a file.

    python -m slope_jax.launch.prefill --checkpoint=DIR --prompts=prompts.jsonl --output_dir=OUT --pp=2 --ring=2

Every line of the file is an object with `prompt` or `prompt_token_ids`, and optionally `id` and sampling settings (see
`prompt_lines`). The output folder gets `results.jsonl`, with one line per prompt in the same order, and `kv/`, with one
folder per prompt. A prompt that cannot be served has an `error` on its line, and the others are served.

The exit status is 0 when every prompt was served, 1 when one was not, and 2 when the program could not start.
"""

from __future__ import annotations

import hashlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
from absl import app, flags, logging

from slope_jax.engine import Engine
from slope_jax.launch.flags import StartError, define_engine_flags, engine_options, setup_runtime
from slope_jax.launch.outputs import RESULTS_FILE, describe_result, prepare_output, save_kv, write_results
from slope_jax.launch.progress import TickProgress
from slope_jax.launch.prompt_lines import PromptLine, read_prompt_lines
from slope_jax.launch.tables import format_results
from slope_jax.mesh.processes.distributed import agree, run_program
from slope_jax.request import ParsedRequest, parse_each
from slope_jax.result import PrefillResult


def serve(engine: Engine, lines: Sequence[PromptLine], output_dir: pathlib.Path) -> int:
    """Prefills the prompts and writes the results.

    In a run of several processes each of them makes this call, and process 0 writes.

    Returns:
      The exit status: 0 when every prompt was served and its KV saved, otherwise 1.
    """
    encode = engine.tokenizer.encode if engine.tokenizer else None
    parsed = parse_each([line.request for line in lines], limits=engine.limits, encode=encode)
    requests = [request.as_request() for request in parsed if isinstance(request, ParsedRequest)]
    with TickProgress() as progress:
        results = iter(engine.prefill(requests, on_tick=progress))
    served: list[tuple[PrefillResult, str]] = []
    records: list[dict[str, Any]] = []
    for position, (line, request) in enumerate(zip(lines, parsed, strict=True)):
        if isinstance(request, ValueError):
            given = str(position) if line.given_id is None else line.given_id
            records.append({"id": given, "line": line.number, "error": str(request)})
            continue
        result = next(results)
        if result.error is not None:
            records.append({"id": result.request_id, "num_tokens": result.num_tokens, "error": result.error})
            continue
        record = describe_result(result, engine.tokenizer) | save_kv(result, output_dir)
        records.append(record)
        served.append((result, record.get("kv") or record["error"]))
    if jax.process_index() == 0:
        write_results(output_dir / RESULTS_FILE, records)
        if served:
            print(format_results([r for r, _ in served], [path for _, path in served], engine.tokenizer))
        for record in records:
            if "error" in record:
                print(f"prefill: {_place(record)}: {record['error']}", file=sys.stderr)
    return int(any("error" in record for record in records))


def _place(record: dict[str, Any]) -> str:
    return (f"line {record['line']}, " if "line" in record else "") + f"id {record['id']!r}"


def run() -> int:
    """The body of the program; returns the exit status."""
    values = flags.FLAGS
    output_dir = pathlib.Path(values.output_dir)
    mesh = setup_runtime()
    try:
        prompts = pathlib.Path(values.prompts).read_bytes()
        agree("the prompts", {"the content of the file": hashlib.sha256(prompts).hexdigest()})
        lines = read_prompt_lines(prompts)
        if jax.process_index() == 0:
            prepare_output(output_dir)
        engine = Engine.load(
            values.checkpoint,
            mesh=mesh,
            chunk_tokens=values.chunk_tokens,
            kv_cache_tokens=values.kv_cache_tokens,
            memory_budget=values.memory_budget,
            **engine_options(values),
        )
    except (OSError, ValueError) as error:
        logging.debug("refused", exc_info=True)  # shown with --verbosity=1
        raise StartError(str(error)) from error
    if values.warmup:
        logging.info("compiled %d programs", engine.warmup())
    return serve(engine, lines, output_dir)


def main(argv: Sequence[str]) -> None:
    """Runs the program."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}")
    sys.exit(run_program(run, refusals=(StartError,)))


def define_flags() -> None:
    """Defines the flags of the program, beside those of the mesh and of the processes."""
    flags.DEFINE_string("checkpoint", None, "Folder of the checkpoint.", required=True)
    flags.DEFINE_string("prompts", None, "File with one JSON object per line.", required=True)
    flags.DEFINE_string("output_dir", None, "Folder for the results.", required=True)
    define_engine_flags()
    flags.DEFINE_integer("chunk_tokens", 4096, "Longest chunk of a prompt that is processed at once.")
    flags.DEFINE_integer("kv_cache_tokens", None, "Tokens that the KV cache holds; by default the model's maximum.")
    flags.DEFINE_string(
        "memory_budget", None, "Bytes that a device may use, such as 64GiB; the KV cache gets what nothing else needs."
    )
    flags.DEFINE_bool("warmup", True, "Compile everything first, so that ttft_s holds no compilation.")


if __name__ == "__main__":
    define_flags()
    app.run(main)
