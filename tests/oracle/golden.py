"""Results of Hugging Face transformers on tiny checkpoints, stored in `golden/`.

`make_golden` writes them. The checkpoints are not stored: a golden file holds a digest of the tensors that it was made
from, and reading it fails when `checkpoints` no longer makes the same ones.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
from numpy.typing import NDArray

from tests.oracle.checkpoints import GOLDEN128, TOY, TOY_IRREGULAR, WIDE, TinyModel, tensors_digest

DIRECTORY = pathlib.Path(__file__).parent / "golden"
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a golden file covers.

    Attributes:
      model: the checkpoint.
      lengths: of the prompts, each once.
      kv_lengths: of those prompts whose KV is stored too.
    """

    model: TinyModel
    lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...] = ()


CASES = {
    "toy": Case(model=TOY, lengths=LENGTHS, kv_lengths=(9, 33)),
    "toy_irregular": Case(model=TOY_IRREGULAR, lengths=LENGTHS, kv_lengths=(9, 33)),
    "toy_attention_factor": Case(model=dataclasses.replace(TOY, rope_attention_factor=1.0), lengths=(17, 40)),
    "wide": Case(model=WIDE, lengths=(1, 5, 6, 17, 40), kv_lengths=(17,)),
    "golden128": Case(model=GOLDEN128, lengths=(127, 128, 129, 130, 300), kv_lengths=(130,)),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """The content of a golden file.

    Attributes:
      model: the checkpoint that it was made from.
      prompts: token ids.
      logits: `[prompts, V]` of the last positions, transformers in float32.
      logits_bf16: the same, transformers in bfloat16.
      kv: by prompt length, keys (after RoPE) and values `[tokens, K, H]` of each layer, transformers in float32.
      versions: of the packages that made it.
    """

    model: TinyModel
    prompts: list[list[int]]
    logits: NDArray[np.float32]
    logits_bf16: NDArray[np.float32]
    kv: dict[int, list[tuple[NDArray[np.float32], NDArray[np.float32]]]]
    versions: dict[str, str]


def save(name: str, golden: Golden) -> pathlib.Path:
    """Writes a golden file."""
    arrays: dict[str, NDArray[np.generic]] = {
        "digest": np.array(tensors_digest(golden.model)),
        "versions": np.array(json.dumps(golden.versions)),
        "logits": golden.logits,
        "logits_bf16": golden.logits_bf16,
    }
    for prompt in golden.prompts:
        arrays[f"prompt_{len(prompt)}"] = np.array(prompt, np.int32)
    for length, layers in golden.kv.items():
        arrays[f"k_{length}"] = np.stack([k for k, _ in layers])
        arrays[f"v_{length}"] = np.stack([v for _, v in layers])
    DIRECTORY.mkdir(exist_ok=True)
    path = DIRECTORY / f"{name}.npz"
    np.savez_compressed(path, allow_pickle=False, **arrays)
    return path


def load(name: str) -> Golden:
    """Reads a golden file.

    Raises:
      ValueError: the checkpoint of that name has other tensors than those that the file was made from.
    """
    case = CASES[name]
    with np.load(DIRECTORY / f"{name}.npz") as arrays:
        made_from, now = str(arrays["digest"]), tensors_digest(case.model)
        if made_from != now:
            raise ValueError(
                f"golden file {name} was made from tensors with digest {made_from}, but the checkpoint of that name "
                f"now has {now}; run `python -m tests.oracle.make_golden`"
            )
        return Golden(
            model=case.model,
            prompts=[arrays[f"prompt_{length}"].tolist() for length in case.lengths],
            logits=arrays["logits"],
            logits_bf16=arrays["logits_bf16"],
            kv={n: list(zip(arrays[f"k_{n}"], arrays[f"v_{n}"], strict=True)) for n in case.kv_lengths},
            versions=json.loads(str(arrays["versions"])),
        )
