"""The float64 forward agrees with transformers and with the published formulas."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from tests.oracle import checkpoints, golden, numpy_forward
from tests.oracle.checkpoints import WriteCheckpoint
from tests.oracle.numpy_forward import Array

# Transformers in float32 differs from float64 by at most 1.1e-5 in the logits and 2.4e-5 in the KV of the golden files
# (make_golden prints it).
FLOAT32_NOISE = 5e-5

# The rope settings of the published models.
PUBLISHED_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}


@pytest.mark.parametrize("name", golden.CASES)
def test_forward_equals_transformers(name: str, checkpoint: WriteCheckpoint) -> None:
    made = golden.load(name)
    directory = checkpoint(made.model)
    for prompt, logits in zip(made.prompts, made.logits, strict=True):
        exact, kv = numpy_forward.forward(directory, prompt)
        np.testing.assert_allclose(exact, logits, rtol=0, atol=FLOAT32_NOISE)
        if len(prompt) in made.kv:
            for (k, v), (k_made, v_made) in zip(kv, made.kv[len(prompt)], strict=True):
                np.testing.assert_allclose(k, k_made, rtol=0, atol=FLOAT32_NOISE)
                np.testing.assert_allclose(v, v_made, rtol=0, atol=FLOAT32_NOISE)


def test_golden_file_of_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = golden.CASES["toy"]
    other = dataclasses.replace(case.model, seed=case.model.seed + 1)
    monkeypatch.setitem(golden.CASES, "toy", dataclasses.replace(case, model=other))
    with pytest.raises(ValueError, match="golden file toy was made from tensors with digest"):
        golden.load("toy")


@pytest.mark.parametrize(
    "options",
    [
        {"experts": "bfloat16", "rope_spelling": "rope_parameters", "num_files": 1},
        {"experts": "float32", "dtype": "float32", "num_files": 5},
    ],
)
def test_all_forms_of_a_checkpoint_have_the_same_values(checkpoint: WriteCheckpoint, options: dict[str, Any]) -> None:
    prompt = checkpoints.random_prompt(checkpoints.TOY_IRREGULAR, 20)
    packed, _ = numpy_forward.forward(checkpoint(checkpoints.TOY_IRREGULAR), prompt)
    unpacked, _ = numpy_forward.forward(checkpoint(checkpoints.TOY_IRREGULAR, **options), prompt)
    np.testing.assert_allclose(unpacked, packed, rtol=0, atol=1e-12)


def test_files_of_a_checkpoint(checkpoint: WriteCheckpoint) -> None:
    directory = checkpoint(checkpoints.TOY, num_files=3)
    names = [f"model-0000{i}-of-00002.safetensors" for i in range(3)]
    assert sorted(path.name for path in directory.glob("*.safetensors")) == names
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == names
    tensors = checkpoints.model_tensors(checkpoints.TOY)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_logits_of_a_position_do_not_depend_on_later_tokens(checkpoint: WriteCheckpoint) -> None:
    directory = checkpoint(checkpoints.WIDE)
    prompt = checkpoints.random_prompt(checkpoints.WIDE, 12)
    everywhere, _ = numpy_forward.forward(directory, prompt, all_positions=True)
    for length in range(1, 13):
        last, _ = numpy_forward.forward(directory, prompt[:length])
        np.testing.assert_allclose(everywhere[length - 1], last, rtol=0, atol=1e-12)


def test_yarn_frequencies_of_the_published_models() -> None:
    speed = numpy_forward.inverse_frequencies(PUBLISHED_ROPE, 64)
    expected = {
        8: 5.081327e-02,
        9: 3.170570e-02,
        12: 6.794959e-03,
        13: 3.860359e-03,
        17: 1.293187e-04,
        18: 3.830881e-05,
        31: 3.023511e-07,
    }
    np.testing.assert_allclose(speed[list(expected)], list(expected.values()), rtol=2e-7)
    assert speed[0] == 1


@pytest.mark.parametrize(
    ("settings", "score"), [({}, 64 * 1.8132604 / 8), ({"attention_factor": 1.0}, 8.0), ({"factor": 1.0}, 8.0)]
)
def test_attention_factor_enters_a_score_twice(settings: dict[str, float], score: float) -> None:
    cos, sin = numpy_forward.rope_tables({**PUBLISHED_ROPE, **settings}, 64, 1)
    rotated = numpy_forward.rotate(np.ones((1, 1, 64)), cos, sin)
    assert (rotated * rotated).sum() / 8 == pytest.approx(score, rel=1e-7)


def test_rotation_keeps_scores_of_equal_distances() -> None:
    cos, sin = numpy_forward.rope_tables(PUBLISHED_ROPE, 64, 9)
    q, k = np.random.default_rng(0).normal(size=(2, 64))
    rotated_q, rotated_k = (numpy_forward.rotate(np.tile(x, (9, 1, 1)), cos, sin)[:, 0] for x in (q, k))
    assert rotated_q[8] @ rotated_k[5] == pytest.approx(rotated_q[3] @ rotated_k[0])
    assert rotated_q[8] @ rotated_k[5] != pytest.approx(rotated_q[8] @ rotated_k[4])


@pytest.mark.parametrize(
    ("gate", "up", "expected", "tolerance"),
    [
        (1, 0, 0.845796, 1e-6),
        (1, -1, 0, 0),
        (8, 8, 55.999625, 1e-6),
        (8, -8, -41.999719, 1e-6),
        (-8, 8, -7.813e-5, 1e-8),
    ],
)
def test_activation(gate: float, up: float, expected: float, tolerance: float) -> None:
    assert numpy_forward.swiglu(np.array([gate, up]), 7.0)[0] == pytest.approx(expected, rel=0, abs=tolerance)


def test_gates_and_ups_are_interleaved() -> None:
    gate_up = np.arange(10) / 10
    pairs = [numpy_forward.swiglu(gate_up[i : i + 2], 7.0)[0] for i in range(0, 10, 2)]
    np.testing.assert_array_equal(numpy_forward.swiglu(gate_up, 7.0), pairs)


@pytest.mark.parametrize(("sink", "expected"), [(0.5, 2.116819), (-np.inf, 2.462117)])
def test_sink_counts_once_in_the_denominator(sink: float, expected: float) -> None:
    assert numpy_forward.softmax_with_sink(np.array([1.0, 2.0]), sink) @ [1, 3] == pytest.approx(expected, abs=5e-7)


def test_each_query_head_has_its_sink_and_the_key_head_of_its_group() -> None:
    q = np.zeros((1, 4, 2))
    k = np.zeros((1, 2, 2))
    v = np.array([[[10.0, 10.0], [20.0, 20.0]]])
    out = numpy_forward.attention(q, k, v, np.log([1.0, 3.0, 4.0, 9.0]), None)
    np.testing.assert_allclose(out[0, :, 0], [10 / 2, 10 / 4, 20 / 5, 20 / 10])


@pytest.mark.parametrize(("position", "keys"), [(0, 1), (126, 127), (127, 128), (128, 128), (129, 128)])
def test_window_counts_the_query_itself(position: int, keys: int) -> None:
    q, k, v = np.zeros((130, 1, 2)), np.zeros((130, 1, 2)), np.zeros((130, 1, 2))
    v[:, 0, 0] = 1
    v[: max(0, position - 127), 0, 1] = 1  # keys outside the window
    v[position + 1 :, 0, 1] = 1  # keys of later tokens
    out = numpy_forward.attention(q, k, v, np.zeros(1), 128)[position, 0]
    np.testing.assert_allclose(out, [keys / (keys + 1), 0])


@pytest.mark.parametrize(("scale", "factor"), [(127, 1.0), (125, 0.25)])
def test_mxfp4_bytes(scale: int, factor: float) -> None:
    block = np.zeros((1, 16), np.uint8)
    block[0, :4] = [0x21, 0x7F, 0x80, 0x3A]
    values = numpy_forward.decode_mxfp4(block, np.array([scale], np.uint8))
    np.testing.assert_array_equal(values[:8], factor * np.array([0.5, 1, -6, 6, 0, 0, -1, 1.5]))
    np.testing.assert_array_equal(np.signbit(values[:8]), [False, False, True, False, False, True, True, False])


def test_mxfp4_scales() -> None:
    scales = np.array([0, 1, 100, 126, 127, 130, 254], np.uint8)
    values = numpy_forward.decode_mxfp4(np.full((7, 16), 0x72, np.uint8), scales).reshape(7, 32)
    np.testing.assert_array_equal(values[:, 0], [np.ldexp(1.0, int(s) - 127) for s in scales])
    np.testing.assert_array_equal(values[:, 1], [np.ldexp(6.0, int(s) - 127) for s in scales])
    with pytest.raises(ValueError, match="255"):
        numpy_forward.decode_mxfp4(np.zeros((1, 16), np.uint8), np.array([255], np.uint8))


def test_router_weighs_the_chosen_experts_only() -> None:
    logits: Array = np.zeros((1, 128))
    logits[0, [40, 3, 77, 9]] = [2, 1.5, 1, 0.5]
    chosen, weights = numpy_forward.route(logits, 4)
    assert chosen.tolist() == [[40, 3, 77, 9]]
    np.testing.assert_allclose(weights[0], [0.45505, 0.27600, 0.16741, 0.10154], atol=6e-6)


def test_router_ties_go_to_the_lower_index() -> None:
    chosen, weights = numpy_forward.route(np.array([[0.0, 1.0, 0.0, 1.0, 0.0]]), 3)
    assert chosen.tolist() == [[1, 3, 0]]
    np.testing.assert_allclose(weights.sum(), 1)
