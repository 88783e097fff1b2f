"""The tokenizer: adds nothing, cuts nothing, and must fit the model."""

from __future__ import annotations

import pathlib

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from slope_jax.model.tokenizer import load_tokenizer

# Byte-level BPE without merges: the id of a byte is known without the library.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT = "def f(x):\n    return 'é 漢 😀'\n"


def byte_id(byte: int) -> int:
    """The id of a byte by the table of GPT-2: printable bytes stand for themselves, the others follow at 256."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return ALPHABET.index(chr(byte) if byte in printable else chr(256 + others.index(byte)))


def write_tokenizer(folder: pathlib.Path) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|bos|>"])
    # Settings of the file that must not reach the ids of a prompt.
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 257)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_ids_are_those_of_the_bytes_and_nothing_is_added_or_cut(tmp_path: pathlib.Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 258)
    assert tokenizer is not None
    ids = tokenizer.encode(TEXT)
    assert ids == [byte_id(b) for b in TEXT.encode()]
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode("") == []
    assert tokenizer.encode("a<|start|>b") == [byte_id(ord("a")), 256, byte_id(ord("b"))]
    assert tokenizer.decode([256]) == "<|start|>"
    assert tokenizer.decode([byte_id(0xC3)]) == "\N{REPLACEMENT CHARACTER}"


def test_a_checkpoint_may_have_no_tokenizer(tmp_path: pathlib.Path) -> None:
    assert load_tokenizer(tmp_path, 258) is None


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path: pathlib.Path) -> None:
    write_tokenizer(tmp_path)
    with pytest.raises(
        ValueError, match=r"tokenizer\.json: its greatest token id is 257, the greatest of the model is 256"
    ):
        load_tokenizer(tmp_path, 257)


@pytest.mark.parametrize("content", ["", "{}", "{", "[1]", '{"model": {"type": "other"}}'])
def test_a_damaged_file_is_refused_by_name(tmp_path: pathlib.Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path, 258)


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path, 258)
