"""The demonstration's prompt is long enough."""

from __future__ import annotations

import pathlib

from slope_jax.launch import demo
from slope_jax.launch import make_checkpoint as maker
from slope_jax.model.tokenizer import load_tokenizer

TINY = maker.PRESETS["tiny"]


def test_the_long_prompt_is_made_of_the_sources(tmp_path: pathlib.Path) -> None:
    tokenizer = load_tokenizer(maker.make_checkpoint(tmp_path / "tiny", TINY), TINY.vocab_size)
    assert tokenizer is not None
    prompt = demo.sources_prompt(tokenizer, 8_000)
    assert 8_000 <= len(tokenizer.encode(prompt)) < 9_000
    first = next(path for path in maker.project_files() if path.suffix == ".py")
    assert first.read_text() in prompt
