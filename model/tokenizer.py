"""The tokenizer of a checkpoint: `tokenizer.json`, without any tokens added (gpt-oss has no BOS)."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence

import tokenizers

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, path: str | os.PathLike[str]):
        """Reads a `tokenizer.json`.

        Raises:
          ValueError: the file cannot be read; the message names it.
        """
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(pathlib.Path(path).read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path}: not a tokenizer: {error}") from error
        # The file may carry settings that cut or fill what is encoded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def max_id(self) -> int:
        """The greatest token id."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """The token ids of a text. Special tokens that are spelled out in the text, as `<|start|>`, are recognised."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included; bytes that are not valid UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def load_tokenizer(directory: str | os.PathLike[str], vocab_size: int) -> Tokenizer | None:
    """The tokenizer of a checkpoint, or None when it has no `tokenizer.json`.

    Raises:
      ValueError: the file cannot be read, or it has token ids that a model with `vocab_size` tokens does not have.
    """
    path = pathlib.Path(directory) / TOKENIZER_FILE
    if not path.exists():
        return None
    tokenizer = Tokenizer(path)
    if tokenizer.max_id >= vocab_size:
        raise ValueError(
            f"{path}: its greatest token id is {tokenizer.max_id}, the greatest of the model is {vocab_size - 1}"
        )
    return tokenizer
