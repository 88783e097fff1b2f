"""The prefill program: a bad line harms no other, and every line of the results says what happened to its prompt."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from slope_jax.kv.files import load_kv
from slope_jax.launch import make_checkpoint as maker
from slope_jax.launch.outputs import folder_name
from slope_jax.launch.prompt_lines import PromptLine, read_prompt_lines
from slope_jax.model.tokenizer import load_tokenizer
from slope_jax.request import Request

TINY = maker.PRESETS["tiny"]


def read(tmp_path: pathlib.Path, content: bytes) -> list[PromptLine]:
    return read_prompt_lines(content)


def test_good_lines_become_requests(tmp_path: pathlib.Path) -> None:
    lines = read(
        tmp_path,
        b'{"id": "a", "prompt": "caf\xc3\xa9"}\r\n'
        b"\n"
        b'  {"prompt_token_ids": [1, 2], "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 7}\n'
        b'{"id": 12, "prompt": "x\\u2028y"}',
    )
    assert lines == [
        PromptLine(1, "a", Request(request_id="a", prompt="café")),
        PromptLine(3, None, Request(prompt_token_ids=[1, 2], temperature=0.5, top_p=0.9, top_k=3, seed=7)),
        PromptLine(4, "12", Request(request_id="12", prompt="x\u2028y")),
    ]


@pytest.mark.parametrize(
    ("line", "given_id", "message"),
    [
        (b'{"id": "a", "prompt": "x"', None, "not a JSON object"),
        (b"\xff", None, "not a JSON object: .*utf-8"),
        (b"[1, 2]", None, "a line is a JSON object, not list"),
        (b'"text"', None, "a line is a JSON object, not str"),
        (b"[" * 100_000, None, "not a JSON object"),
        (b'{"id": "a", "prompt": "x", "prompts": 1}', "a", r"unknown fields \['prompts'\]; known fields are"),
        (b'{"id": "a", "prompt": "x", "prompt": "y"}', None, r"given twice: \['prompt'\]"),
        (b'{"id": true, "prompt": "x"}', None, "id must be a text or an integer of at most 64 bits, not True"),
        (b'{"id": ["a"], "prompt": "x"}', None, "id must be a text"),
        (b'{"id": 18446744073709551616, "prompt": "x"}', None, "at most 64 bits"),
        (b'{"id": "", "prompt": "x"}', "", "request_id must not be empty"),
        (b'{"id": "a"}', "a", "none of them"),
        (b'{"id": "a", "prompt": "x", "prompt_token_ids": [1]}', "a", "both of them"),
        (b'{"id": "a", "prompt": null}', "a", "prompt is null"),
        (b'{"id": "a", "prompt": 5}', "a", "prompt must be a text, not 5"),
        (b'{"id": "a", "prompt": "\\ud800"}', "a", "lone surrogate"),
        (b'{"id": "a", "prompt_token_ids": "abc"}', "a", "not str"),
        (b'{"id": "a", "prompt_token_ids": 5}', "a", "not int"),
        (b'{"id": "a", "prompt_token_ids": {"0": 1}}', "a", "not dict"),
        (b'{"id": "a", "prompt_token_ids": []}', "a", "prompt is empty"),
        (b'{"id": "a", "prompt_token_ids": [[1]]}', "a", "of type list"),
        (b'{"id": "a", "prompt_token_ids": [1, null]}', "a", "position 1 is None"),
        (b'{"id": "a", "prompt_token_ids": [1, true]}', "a", "position 1 is True"),
        (b'{"id": "a", "prompt_token_ids": [1.0]}', "a", "position 0 is 1.0 of type float"),
        (b'{"id": "a", "prompt_token_ids": [-1]}', "a", "-1 at position 0"),
        (b'{"id": "a", "prompt": "x", "temperature": NaN}', "a", "temperature must be finite"),
        (b'{"id": "a", "prompt": "x", "temperature": null}', "a", "temperature must be a number"),
        (b'{"id": "a", "prompt": "x", "top_k": 1.5}', "a", "top_k must be an integer"),
    ],
)
def test_a_bad_line_is_an_error_of_its_own(
    tmp_path: pathlib.Path, line: bytes, given_id: str | None, message: str
) -> None:
    before, bad, after = read(tmp_path, b'{"prompt": "x"}\n' + line + b'\n{"prompt": "y"}\n')
    assert (bad.number, bad.given_id) == (2, given_id)
    with pytest.raises(ValueError, match=message):
        raise bad.request if isinstance(bad.request, ValueError) else AssertionError(bad)
    assert before.request == Request(prompt="x")
    assert after.request == Request(prompt="y")


def test_every_id_has_a_folder_of_its_own() -> None:
    ids = ["a", "A b", "../x", ".", "..", "a/b", "a%2Fb", "é", "\0", "x" * 300, "x" * 301, "a.b"]
    names = [folder_name(i) for i in ids]
    assert len(set(names)) == len(ids)
    for name in names:
        assert pathlib.PurePath(name).parts == (name,)
        assert name not in {".", ".."}
        assert len(name.encode()) <= 200


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return maker.make_checkpoint(tmp_path_factory.mktemp("made") / "tiny", TINY, seed=3)


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "slope_jax.launch.prefill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def run_lines(
    checkpoint: pathlib.Path, folder: pathlib.Path, lines: list[Any], *arguments: str
) -> tuple[int, list[dict[str, Any]], str]:
    """The exit status, the results and the text of a run in float32 on a 2 x 1 x 2 mesh."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    done = run_program(
        f"--checkpoint={checkpoint}",
        f"--prompts={prompts}",
        f"--output_dir={folder / 'out'}",
        "--pp=2",
        "--ulysses=2",
        "--cpu_devices=4",
        "--dtype=float32",
        "--chunk_tokens=64",
        *arguments,
    )
    results = folder / "out" / "results.jsonl"
    text = done.stdout + done.stderr
    assert results.exists(), text
    return done.returncode, [json.loads(line) for line in results.read_text().splitlines()], text


def test_the_program_serves_the_good_lines_and_reports_the_bad_ones(
    tiny_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    ids = [(37 * i) % TINY.vocab_size for i in range(150)]
    text = "import numpy as np\n"
    lines = [
        {"id": "long", "prompt_token_ids": ids},
        "not json",
        {"id": "text/é", "prompt": text},
        {"id": "long", "prompt_token_ids": [1]},
        {"prompt_token_ids": [TINY.vocab_size]},
        {"prompt_token_ids": [5]},
        {"id": "bad", "prompt": ""},
        {"id": "too long", "prompt_token_ids": [1] * 131_073},
    ]
    status, results, output = run_lines(tiny_dir, tmp_path, lines)
    assert status == 1
    assert [r["id"] for r in results] == ["long", "1", "text/é", "long", "4", "5", "bad", "too long"]
    errors = {i: r["error"] for i, r in enumerate(results) if "error" in r}
    assert sorted(errors) == [1, 3, 4, 6, 7]
    assert "not a JSON object" in errors[1]
    assert "'long' was given before" in errors[3]
    assert "512 at position 0" in errors[4]
    assert "empty" in errors[6]
    assert "131073 tokens, the limit is 131072" in errors[7]
    for message in errors.values():
        assert message in output
    assert "Traceback" not in output

    tokenizer = load_tokenizer(tiny_dir, TINY.vocab_size)
    assert tokenizer is not None
    prompts = {0: ids, 2: tokenizer.encode(text), 5: [5]}
    for i, prompt in prompts.items():
        result = results[i]
        assert set(result) == {"id", "num_tokens", "token_id", "text", "top_logprobs", "ttft_s", "kv"}
        assert result["num_tokens"] == len(prompt)
        assert result["text"] == tokenizer.decode([result["token_id"]])
        assert result["ttft_s"] > 0
        top = result["top_logprobs"]
        assert len(top) == 5
        assert top[0]["token_id"] == result["token_id"]
        assert top[0]["text"] == result["text"]
        logprobs = [t["logprob"] for t in top]
        assert logprobs == sorted(logprobs, reverse=True)
        assert sum(math.exp(x) for x in logprobs) <= 1
        kv = load_kv(result["kv"], token_ids=prompt, dtype="float32", num_layers=TINY.num_layers)
        assert kv.header.first_token_id == result["token_id"]
        assert pathlib.Path(result["kv"]).parent == tmp_path / "out" / "kv"
        assert np.abs(kv.layer(1)[1]).max() > 0


def test_a_run_without_bad_lines_ends_with_0_and_gives_the_same_numbers_again(
    tiny_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    lines = [{"id": "a", "prompt": "x = 1"}, {"id": "b", "prompt": "x = 1", "temperature": 2.0, "seed": 5}]
    first_status, first, _ = run_lines(tiny_dir, tmp_path, lines, "--nowarmup")
    second_status, second, _ = run_lines(tiny_dir, tmp_path, lines, "--nowarmup")
    assert (first_status, second_status) == (0, 0)
    for a, b in zip(first, second, strict=True):
        assert {k: v for k, v in a.items() if k != "ttft_s"} == {k: v for k, v in b.items() if k != "ttft_s"}
    assert first[0]["top_logprobs"] == first[1]["top_logprobs"]
    for how in (["--expert_parallel"], ["--tensor_parallel", "--all_reduce=tree"]):
        status, split, _ = run_lines(tiny_dir, tmp_path, lines, "--nowarmup", *how)
        assert status == 0
        for a, b in zip(first, split, strict=True):
            assert a["token_id"] == b["token_id"]
            ordinary, parallel = ([t["logprob"] for t in result["top_logprobs"]] for result in (a, b))
            np.testing.assert_allclose(ordinary, parallel, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts=/nowhere.jsonl"], "nowhere.jsonl"),
        (["--checkpoint=/nowhere"], "nowhere"),
        (["--pp=3", "--cpu_devices=2"], "needs 3 devices"),
        (["--dtype=float16"], "float16"),
        (
            ["--memory_budget=100kB"],
            "the memory budget of 97.66 KiB (100,000 bytes) per device is less than its weights",
        ),
        (["--expert_parallel", "--ulysses=4", "--cpu_devices=4"], "split 6 experts over ulysses=4"),
        (["--expert_parallel", "--tensor_parallel"], "both divide the experts"),
        (["--all_reduce=flat"], "of no use without tensor_parallel"),
    ],
)
def test_what_cannot_start_says_why(
    tiny_dir: pathlib.Path, tmp_path: pathlib.Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    done = run_program(
        f"--checkpoint={tiny_dir}",
        f"--prompts={tmp_path / 'prompts.jsonl'}",
        f"--output_dir={tmp_path / 'out'}",
        *arguments,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out" / "results.jsonl").exists()
