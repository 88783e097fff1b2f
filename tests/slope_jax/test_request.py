"""Requests: every kind of bad input is refused before device work, by value and limit, and harms no other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from slope_jax.request import ParsedRequest, Request, RequestLimits, parse_batch, parse_each

VOCAB = 201_088
LIMITS = RequestLimits(vocab_size=VOCAB, max_tokens=12, max_tokens_reason="the KV cache")


def encode(text: str) -> list[int]:
    return list(text.encode())


def parse(*items: Any) -> list[ParsedRequest]:
    return parse_batch(list(items), limits=LIMITS, encode=encode)


BAD_IDS = [
    ([-1], r"token id -1 at position 0 is negative; the least id is 0"),
    ([5, 201_088], r"token id 201088 at position 1 .* greatest id is 201087"),
    ([2**31], r"2147483648 at position 0"),
    ([2**32 + 5], r"4294967301 at position 0"),
    ([10**20], r"100000000000000000000 at position 0"),
    ([2**64], r"18446744073709551616 at position 0"),
    ([10**5000], r"2\*\*16609 or greater in size at position 0"),
    ([-(10**5000)], r"-2\*\*16609 or greater in size at position 0 is negative"),
    ([1, 1.5], r"position 1 is 1.5 of type float"),
    ([1.0], r"position 0 is 1.0 of type float"),
    ([float("nan")], r"position 0 is nan of type float"),
    ([7, True], r"position 1 is True of type bool"),
    ([np.True_], r"of type bool"),
    (["5"], r"position 0 is '5' of type str"),
    ([None], r"position 0 is None of type NoneType"),
    ([[1, 2]], r"position 0 is \[1, 2\] of type list"),
    ([[]], r"position 0 is \[\] of type list"),
    ([], r"prompt is empty"),
    ((), r"prompt is empty"),
    (np.zeros(0, np.int32), r"prompt is empty"),
    (np.ones((2, 2), np.int32), r"one dimension, not the shape \(2, 2\)"),
    (np.array(3), r"one dimension, not the shape \(\)"),
    (np.ones(2, np.float32), r"not an array of float32"),
    (np.ones(2, bool), r"not an array of bool"),
    (np.array([2**64 - 1], np.uint64), r"18446744073709551615 at position 0"),
    (np.array([1, 2**70], object), r"1180591620717411303424 at position 1"),
    (list(range(13)), r"prompt has 13 tokens, the limit is 12 \(the KV cache\)"),
]


@pytest.mark.parametrize(("ids", "message"), BAD_IDS, ids=lambda v: v[:40] if isinstance(v, str) else None)
def test_bad_ids_are_refused_and_name_value_position_and_limit(ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        parse([1], ids)
    assert "item 1" in str(error.value)
    with pytest.raises(ValueError, match=message):
        parse(Request(prompt_token_ids=ids))


@pytest.mark.parametrize("item", [None, 1.5, {"prompt": "a"}, {1, 2}, b"abc", object()])
def test_other_types_are_refused(item: Any) -> None:
    with pytest.raises(ValueError, match=rf"not {type(item).__name__}"):
        parse([1], item)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ("some text", r"not one str; write \['some text'\]"),
        ([17, 4, 99], r"bare token ids; write \[\[17, 4, 99\]\]"),
        ((np.int32(3),), r"bare token ids"),
        (np.array([[1, 2]]), r"not ndarray"),
        ({"prompt": "a"}, r"not dict"),
        (None, r"not NoneType"),
        (7, r"not int"),
    ],
)
def test_one_prompt_in_place_of_a_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_batch(batch, limits=LIMITS, encode=encode)


def test_one_request_in_place_of_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not one Request; write \[request\]"):
        parse_batch(Request(prompt="a"), limits=LIMITS, encode=encode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "ids",
    [
        [0, 201_087, 3],
        (0, 201_087, 3),
        np.array([0, 201_087, 3], np.int32),
        np.array([0, 201_087, 3], np.uint64),
        [np.int64(0), np.uint32(201_087), 3],
    ],
)
def test_ids_of_every_integer_kind_become_python_integers(ids: Any) -> None:
    (parsed,) = parse(ids)
    assert parsed.token_ids == (0, 201_087, 3)
    assert {type(i) for i in parsed.token_ids} == {int}


def test_results_are_in_order_with_free_ids() -> None:
    parsed = parse("ab", [5], Request(prompt="c", request_id="0"), Request(prompt_token_ids=[9], request_id="b"), "é")
    assert [p.request_id for p in parsed] == ["0-2", "1", "0", "b", "4"]
    assert [p.token_ids for p in parsed] == [(97, 98), (5,), (99,), (9,), (195, 169)]


def test_an_empty_batch_has_no_results() -> None:
    assert parse() == []


@pytest.mark.parametrize("length", [1, 11, 12])
def test_lengths_up_to_the_limit_are_served(length: int) -> None:
    assert len(parse([3] * length)[0].token_ids) == length


def test_duplicate_ids_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"request 'a' \(item 2\): the request id 'a' was given before"):
        parse(Request(prompt="x", request_id="a"), "y", Request(prompt="z", request_id="a"))


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        parse_batch(["text"], limits=LIMITS, encode=None)
    assert parse_batch([[1]], limits=LIMITS, encode=None)[0].token_ids == (1,)


@pytest.mark.parametrize(("text", "message"), [("", "prompt is empty"), ("\ud800", "lone surrogate at character 0")])
def test_bad_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_a_tokenizer_that_gives_nothing_or_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        parse_batch(["a"], limits=LIMITS, encode=lambda _: [])
    with pytest.raises(ValueError, match=r"201088 at position 0"):
        parse_batch(["a"], limits=LIMITS, encode=lambda _: [VOCAB])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "none of them"),
        ({"prompt_token_ids": [1]}, "both of them"),
        ({"prompt": 5}, "prompt must be a text, not 5 of type int"),
        ({"request_id": 7}, "request_id must be a text, not 7"),
        ({"request_id": ""}, "request_id must not be empty"),
        ({"temperature": -0.1}, "temperature must be 0 or greater, not -0.1"),
        ({"temperature": float("nan")}, "temperature must be finite, not nan"),
        ({"temperature": float("inf")}, "temperature must be finite, not inf"),
        ({"temperature": 10**400}, "temperature must be finite"),
        ({"temperature": "1"}, "temperature must be a number, not '1'"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"top_p": 0}, "top_p must be greater than 0 and at most 1, not 0.0"),
        ({"top_p": 1.01}, "at most 1, not 1.01"),
        ({"top_p": float("nan")}, "top_p must be finite"),
        ({"top_k": -1}, r"top_k must be 0 \(all tokens\) or greater, not -1"),
        ({"top_k": 2.0}, "top_k must be an integer, not 2.0"),
        ({"top_k": True}, "top_k must be an integer, not True"),
        ({"seed": -1}, "seed must be in 0..18446744073709551615, not -1"),
        ({"seed": 2**64}, "not 18446744073709551616"),
        ({"seed": None}, "seed must be an integer, not None"),
    ],
)
def test_bad_fields_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**({"prompt": "a"} | fields))


def test_sampling_fields_reach_the_parsed_request() -> None:
    request = Request(prompt_token_ids=[1], temperature=np.float32(0.5), top_p=1, top_k=np.int64(3), seed=2**64 - 1)  # type: ignore[arg-type]
    (parsed,) = parse(request)
    assert (parsed.temperature, parsed.top_p, parsed.top_k, parsed.seed) == (0.5, 1.0, 3, 2**64 - 1)
    assert parse_batch([parsed.as_request()], limits=LIMITS) == [parsed]


def test_requests_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Request(prompt="a").seed = 3  # type: ignore[misc]


def test_parse_each_keeps_the_good_requests() -> None:
    unreadable = ValueError("line 3 is not JSON")
    results = parse_each(
        [
            [1],
            [-1],
            unreadable,
            Request(prompt="x", request_id="a"),
            Request(prompt="y", request_id="a"),
            Request(prompt_token_ids=[VOCAB], request_id="b"),
            [2],
        ],
        limits=LIMITS,
        encode=encode,
    )
    served = {i: r.token_ids for i, r in enumerate(results) if isinstance(r, ParsedRequest)}
    assert served == {0: (1,), 3: (120,), 6: (2,)}
    assert results[2] is unreadable
    assert "'a' was given before" in str(results[4])
