"""Prompts as users give them, checked on the host before anything touches a device.

Token ids are compared with the vocabulary as Python integers: a cast to a machine integer would wrap an id that is too
large into a valid one, and JAX clamps indices that are out of range.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

MAX_SEED = 2**64 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how its first token is chosen.

    Attributes:
      prompt_token_ids: the prompt as token ids, or None when `prompt` is given.
      prompt: the prompt as text, or None when `prompt_token_ids` is given.
      request_id: a name that is unique in the batch; by default the position in the batch.
      temperature: 0 takes the most likely token, greater values sample from `softmax(logits / temperature)`.
      top_p: sample from the smallest set of most likely tokens whose probabilities sum to this, in (0, 1].
      top_k: sample from this many most likely tokens; 0 means all.
      seed: seed of the random number, 0 to 2**64 - 1; the same seed gives the same token.

    Raises:
      ValueError: a field has a wrong type or is outside its range.
    """

    prompt_token_ids: Sequence[int] | NDArray[np.integer] | None = None
    prompt: str | None = None
    request_id: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompt_token_ids is None):
            count = "none" if self.prompt is None else "both"
            raise ValueError(f"a request needs either prompt or prompt_token_ids, but {count} of them was given")
        if self.prompt is not None:
            _check_text("prompt", self.prompt)
        if self.prompt_token_ids is not None:
            object.__setattr__(self, "prompt_token_ids", check_ids(self.prompt_token_ids))
        if self.request_id is not None:
            _check_text("request_id", self.request_id)
        object.__setattr__(self, "temperature", _check_float("temperature", self.temperature))
        object.__setattr__(self, "top_p", _check_float("top_p", self.top_p))
        object.__setattr__(self, "top_k", _check_int("top_k", self.top_k))
        object.__setattr__(self, "seed", _check_int("seed", self.seed))
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 or greater, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be greater than 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or greater, not {_show(self.top_k)}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be in 0..{MAX_SEED}, not {_show(self.seed)}")


Prompt = str | Sequence[int] | NDArray[np.integer] | Request
Encode = Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What an engine can serve.

    Attributes:
      vocab_size: token ids are below this.
      max_tokens: the longest prompt, in tokens; the least of all limits that apply.
      max_tokens_reason: what sets `max_tokens`, for the error message.
    """

    vocab_size: int
    max_tokens: int
    max_tokens_reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A request that passed all checks: its ids are Python integers in 0..vocab_size - 1, at least one of them."""

    request_id: str
    token_ids: tuple[int, ...]
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def as_request(self) -> Request:
        """The same request in the form that `Engine.prefill` takes."""
        return Request(
            prompt_token_ids=self.token_ids,
            request_id=self.request_id,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
        )


def parse_batch(batch: Sequence[Prompt], *, limits: RequestLimits, encode: Encode | None = None) -> list[ParsedRequest]:
    """Checks a batch and turns text into token ids.

    Args:
      batch: strings, sequences of ids (lists, tuples, one-dimensional integer arrays) and `Request`s, in any mix.
      limits: what the engine can serve.
      encode: the tokenizer, or None when the checkpoint has none.

    Returns:
      One parsed request per item, in the batch's order.

    Raises:
      ValueError: an item cannot be served; the message names the item, the value and the limit.
    """
    items = check_batch_type(batch)
    parsed = []
    for position, result in enumerate(parse_each(items, limits=limits, encode=encode)):
        if isinstance(result, ValueError):
            raise ValueError(f"{_label(items[position], position)}: {result}") from result
        parsed.append(result)
    return parsed


def parse_each(
    batch: Iterable[Prompt | ValueError], *, limits: RequestLimits, encode: Encode | None = None
) -> list[ParsedRequest | ValueError]:
    """Like `parse_batch`, but an item that cannot be served becomes its error and the others are kept.

    An item that is already an error (a line of a file that could not be read) stays what it is. Of several items with
    one request id the first is served.
    """
    items = list(batch)
    given = [item.request_id for item in items if isinstance(item, Request) and item.request_id is not None]
    taken, seen = set(given), set[str]()
    results: list[ParsedRequest | ValueError] = []
    for position, item in enumerate(items):
        if isinstance(item, ValueError):
            results.append(item)
            continue
        try:
            request = item if isinstance(item, Request) else _as_request(item)
            name = request.request_id
            if name is None:
                name = _free_id(position, taken)
                taken.add(name)
            elif name in seen:
                raise ValueError(f"the request id {name!r} was given before; ids must be unique")
            seen.add(name)
            results.append(_parse(request, name, limits, encode))
        except ValueError as error:
            results.append(error)
    return results


def check_batch_type(batch: object) -> list[Prompt]:
    """The items of a batch; raises ValueError when one prompt was given where a list of prompts is expected."""
    if isinstance(batch, str | Request):
        example = "[request]" if isinstance(batch, Request) else "['some text']"
        raise ValueError(f"a batch is a list of prompts, not one {type(batch).__name__}; write {example}")
    if not isinstance(batch, list | tuple):
        raise ValueError(f"a batch is a list or tuple of prompts, not {type(batch).__name__}")
    if batch and all(isinstance(item, int | np.integer) for item in batch):
        raise ValueError(
            "a batch is a list of prompts, but it holds bare token ids; write [[17, 4, 99]] for one prompt"
        )
    return list(batch)


def check_ids(ids: object) -> tuple[int, ...]:
    """Token ids as non-negative Python integers; the ValueError names the first wrong value and its position."""
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1:
            raise ValueError(f"token ids must have one dimension, not the shape {ids.shape}")
        if ids.dtype.kind not in "iuO":
            raise ValueError(f"token ids must be integers, not an array of {ids.dtype}")
        ids = ids.tolist()
    if isinstance(ids, str | bytes | bytearray | memoryview) or not isinstance(ids, Sequence):
        raise ValueError(f"token ids must be a list, a tuple or an array of integers, not {type(ids).__name__}")
    if not ids:
        raise ValueError("the prompt is empty; it needs at least 1 token")
    checked = []
    for position, value in enumerate(ids):
        # bool is a subclass of int, and True would be token 1.
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
            raise ValueError(
                f"the token id at position {position} is {_show(value)} of type {type(value).__name__}; "
                "token ids are integers"
            )
        number = int(value)
        if number < 0:
            raise ValueError(f"the token id {_show(number)} at position {position} is negative; the least id is 0")
        checked.append(number)
    return tuple(checked)


def _as_request(item: object) -> Request:
    if isinstance(item, str):
        return Request(prompt=item)
    if isinstance(item, np.ndarray) or (isinstance(item, Sequence) and not isinstance(item, bytes | bytearray)):
        return Request(prompt_token_ids=item)
    raise ValueError(
        f"a prompt is a text, a list, tuple or integer array of token ids, or a Request, not {type(item).__name__}"
    )


def _parse(request: Request, name: str, limits: RequestLimits, encode: Encode | None) -> ParsedRequest:
    if request.prompt is None:
        ids = check_ids(request.prompt_token_ids)
    elif not request.prompt:
        raise ValueError("the prompt is empty; it needs at least 1 token")
    elif encode is None:
        raise ValueError(
            "the prompt is text, but the checkpoint has no tokenizer.json to encode it with; give prompt_token_ids"
        )
    else:
        ids = check_ids(encode(request.prompt))
    if len(ids) > limits.max_tokens:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, the limit is {limits.max_tokens} ({limits.max_tokens_reason})"
        )
    for position, value in enumerate(ids):
        if value >= limits.vocab_size:
            raise ValueError(
                f"the token id {_show(value)} at position {position} is outside the vocabulary; "
                f"the greatest id is {limits.vocab_size - 1}"
            )
    return ParsedRequest(
        request_id=name,
        token_ids=ids,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
    )


def _free_id(position: int, taken: set[str]) -> str:
    """The position as an id, with a suffix when another request was given that id by its user."""
    name, suffix = str(position), 1
    while name in taken:
        suffix += 1
        name = f"{position}-{suffix}"
    return name


def _label(item: object, position: int) -> str:
    if isinstance(item, Request) and item.request_id is not None:
        return f"request {item.request_id!r} (item {position})"
    return f"item {position}"


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, not {_show(value)} of type {type(value).__name__}")
    if name == "request_id" and not value:
        raise ValueError("request_id must not be empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: a lone surrogate at character {error.start}") from error


def _check_float(name: str, value: object) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"{name} must be a number, not {_show(value)} of type {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {_show(value)}")
    return number


def _check_int(name: str, value: object) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ValueError(f"{name} must be an integer, not {_show(value)} of type {type(value).__name__}")
    return operator.index(value)


def _show(value: object) -> str:
    """A short form for messages; Python refuses to print integers of more than some thousand digits."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"{'-' if value < 0 else ''}2**{value.bit_length() - 1} or greater in size"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
