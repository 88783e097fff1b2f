"""The prompts file of the prefill program: one JSON object per line, each line read on its own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from slope_jax.request import Request

_FIELDS = ("id", "prompt", "prompt_token_ids", "temperature", "top_p", "top_k", "seed")


@dataclasses.dataclass(frozen=True, slots=True)
class PromptLine:
    """A line of a prompts file.

    Attributes:
      number: the line in the file, from 1.
      given_id: the id that the line gives, or None when it gives none or could not be read.
      request: the request, or the error that kept it from being read.
    """

    number: int
    given_id: str | None
    request: Request | ValueError


def read_prompt_lines(content: bytes) -> list[PromptLine]:
    """Reads the content of a prompts file; blank lines are skipped.

    Each line is an object with `prompt` (text) or `prompt_token_ids`, and optionally `id` (text or integer),
    `temperature`, `top_p`, `top_k` and `seed`. A line without an id is given its position among the prompts.
    """
    lines = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            lines.append(_read_line(number, line))
    return lines


def _read_line(number: int, content: bytes) -> PromptLine:
    given_id = None
    try:
        fields = _parse_json(content)
        given_id = _read_id(fields.pop("id", None))
        unknown = sorted(fields.keys() - set(_FIELDS))
        if unknown:
            raise ValueError(f"unknown fields {unknown}; known fields are {list(_FIELDS)}")
        for name in ("prompt", "prompt_token_ids"):
            if name in fields and fields[name] is None:
                raise ValueError(f"{name} is null")
        return PromptLine(number, given_id, Request(request_id=given_id, **fields))
    except ValueError as error:
        return PromptLine(number, given_id, error)


def _parse_json(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON object: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a line is a JSON object, not {type(fields).__name__}")
    return fields


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a field is given twice: {sorted({n for n in names if names.count(n) > 1})}")
    return fields


def _read_id(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**64:
        return str(value)
    raise ValueError(f"id must be a text or an integer of at most 64 bits, not {repr(value)[:80]}")
