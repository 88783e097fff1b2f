"""config.json in all its spellings; what the forward pass does not implement is refused by name."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from slope_jax.model.config import FULL, SLIDING, GptOssConfig, RopeConfig, load_config
from tests.oracle import checkpoints
from tests.oracle.checkpoints import TOY, WIDE

PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": [SLIDING, FULL] * 18,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "num_local_experts": 128, "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


def published(**changes: Any) -> dict[str, Any]:
    """The published config.json of the 120b model with changes; a change to ... takes the key away."""
    return {key: value for key, value in (PUBLISHED | changes).items() if value is not ...}


def rope(**changes: Any) -> dict[str, Any]:
    table = PUBLISHED["rope_scaling"] | changes
    return {key: value for key, value in table.items() if value is not ...}


EXPECTED = GptOssConfig(
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    num_experts=128,
    experts_per_token=4,
    sliding_window=128,
    layer_types=(SLIDING, FULL) * 18,
    max_position=131072,
    rms_norm_eps=1e-5,
    swiglu_limit=7.0,
    rope=RopeConfig(theta=150000.0, factor=32.0, original_max_position=4096, truncate=False),
    eos_token_ids=(200002,),
)

# As transformers 5 writes it.
NEW_SPELLING: dict[str, Any] = {
    "rope_scaling": ..., "rope_theta": ..., "rope_parameters": rope(rope_theta=150000), "experts_per_token": ...,
    "initial_context_length": ..., "swiglu_alpha": 1.702, "dtype": "bfloat16", "max_seq_len_cached": None,
    "bos_token_id": None, "output_hidden_states": False, "return_dict": True, "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "problem_type": None,
    "_name_or_path": "", "transformers_version": "5.5.4", "per_layer_config": None, "quantization_config": ...,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        NEW_SPELLING,
        {"num_experts_per_tok": ...},
        {"experts_per_token": ...},
        {"num_local_experts": ..., "num_experts": 128},
        {"layer_types": ...},
        {"swiglu_limit": ...},
        {"torch_dtype": "bfloat16"},
        {"rope_theta": ..., "rope_scaling": rope(rope_theta=150000.0)},
        {"rope_scaling": rope(rope_type=..., type="yarn", attention_factor=None)},
        {"rope_parameters": rope(rope_theta=150000)},
        {"rope_scaling": rope(beta_fast=..., beta_slow=..., partial_rotary_factor=1.0)},
        {"quantization_config": None},
    ],
    ids=lambda changes: ",".join(changes)[:40] or "published",
)
def test_spellings_of_the_same_model(changes: dict[str, Any]) -> None:
    config = GptOssConfig.from_json(published(**changes))
    assert config == EXPECTED
    assert config.fingerprint() == EXPECTED.fingerprint()
    assert config.num_layers == 36


@pytest.mark.parametrize("model", [TOY, WIDE], ids=["toy", "wide"])
def test_every_field_is_read_from_its_own_key(model: checkpoints.TinyModel) -> None:
    """The sizes of these models differ from one another, so no key can stand in for another."""
    config = GptOssConfig.from_json(checkpoints.config_dict(model))
    assert dataclasses.asdict(config) == {
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "num_experts": model.num_experts,
        "experts_per_token": model.experts_per_token,
        "sliding_window": model.window,
        "layer_types": model.layer_types,
        "max_position": model.max_position,
        "rms_norm_eps": model.rms_norm_eps,
        "swiglu_limit": model.swiglu_limit,
        "swiglu_alpha": 1.702,
        "eos_token_ids": (model.vocab - 3,),
        "rope": {
            "theta": model.rope_theta,
            "factor": model.rope_factor,
            "original_max_position": model.rope_original_max,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": model.rope_truncate,
            "attention_factor": None,
        },
    }


def test_explicit_settings_are_kept() -> None:
    changes = {"swiglu_alpha": 1.5, "swiglu_limit": 5, "rope_scaling": rope(attention_factor=1, truncate=...)}
    config = GptOssConfig.from_json(published(**changes, eos_token_id=[7, 9]))
    assert (config.swiglu_alpha, config.swiglu_limit, config.eos_token_ids) == (1.5, 5.0, (7, 9))
    assert config.rope.attention_factor == 1.0
    assert config.rope.truncate, "the default of YaRN is to truncate"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, 'model_type "llama"'),
        ({"model_type": ...}, "model_type is missing"),
        ({"architectures": ["GptOssForSequenceClassification"]}, "architectures"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"attention_bias": False}, "attention_bias false"),
        ({"attention_bias": 1}, "attention_bias 1"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings true"),
        ({"torch_dtype": "float16"}, 'torch_dtype "float16"'),
        ({"dtype": "float16"}, 'dtype "float16"'),
        ({"per_layer_config": {"3": {"sliding_window": 64}}}, "per_layer_config"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quant_method 'gptq'"),
        ({"quantization_config": {"bits": 4}}, "quant_method None"),
        ({"quantization_config": {"quant_method": "mxfp4", "group_size": 16}}, "group_size"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attention_sinks": False, "b_setting": 1}, "attention_sinks, b_setting"),
        ({"rope_scaling": ...}, "rope_scaling .* is missing"),
        ({"rope_scaling": rope(rope_type="llama3")}, r"rope type \['llama3'\]"),
        ({"rope_scaling": rope(rope_type=...)}, "rope type"),
        ({"rope_scaling": rope(type="linear")}, "rope type"),
        ({"rope_scaling": rope(mscale=0.7)}, "mscale"),
        ({"rope_scaling": rope(partial_rotary_factor=0.5)}, "partial_rotary_factor"),
        ({"rope_scaling": rope(factor=...)}, "factor is missing"),
        ({"rope_scaling": rope(factor="32")}, "factor must be a number"),
        ({"rope_scaling": rope(factor=0.5)}, "factor must be at least 1, not 0.5"),
        ({"rope_scaling": rope(beta_fast=1.0)}, "beta_slow"),
        ({"rope_scaling": rope(truncate="no")}, "truncate"),
        ({"rope_scaling": rope(attention_factor=0)}, "attention_factor must be positive"),
        ({"rope_scaling": rope(original_max_position_embeddings=4096.5)}, "original_max_position"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object"),
        ({"rope_theta": ...}, "rope_theta is missing"),
        ({"rope_theta": 1.0}, "theta must be greater than 1"),
        ({"rope_theta": float("nan")}, "theta must be finite|rope_theta nan contradicts"),
        ({"rope_scaling": rope(rope_theta=10000)}, "rope_theta 150000 contradicts rope_theta 10000"),
        ({"rope_parameters": rope(factor=16.0)}, "contradict each other in factor"),
        ({"initial_context_length": 8192}, "initial_context_length 8192 contradicts"),
        ({"experts_per_token": 8}, "num_experts_per_tok is 4 but experts_per_token is 8"),
        ({"num_experts_per_tok": 129, "experts_per_token": 129}, "129 experts per token are more than the 128"),
        ({"num_key_value_heads": 7}, "64 query heads cannot be divided among 7 KV heads"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer, not 0"),
        ({"vocab_size": -1}, "vocab_size must be a positive integer, not -1"),
        ({"hidden_size": 2880.0}, "hidden_size must be a positive integer, not 2880.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a positive integer, not True"),
        ({"num_hidden_layers": 24}, "layer_types has 36 entries, but num_hidden_layers is 24"),
        ({"layer_types": [SLIDING, "linear_attention"] * 18}, r"layer_types\[1\] is 'linear_attention'"),
        ({"layer_types": "sliding"}, "layer_types must be a list"),
        ({"rms_norm_eps": ...}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be positive"),
        ({"swiglu_limit": float("inf")}, "swiglu_limit must be finite"),
        ({"swiglu_alpha": True}, "swiglu_alpha must be a number"),
        ({"eos_token_id": 201088}, "eos_token_id 201088 is not one of the 201088 tokens"),
        ({"eos_token_id": [200002, "x"]}, "eos_token_id 'x'"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_unsupported_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GptOssConfig.from_json(published(**changes))


def test_direct_construction_is_checked_too() -> None:
    with pytest.raises(ValueError, match="layer_types is empty"):
        dataclasses.replace(EXPECTED, layer_types=())
    with pytest.raises(ValueError, match="num_experts must be a positive integer, not True"):
        dataclasses.replace(EXPECTED, num_experts=True)


def test_fingerprint_depends_on_every_hyperparameter_but_the_end_tokens() -> None:
    prints = {EXPECTED.fingerprint()}
    for field in dataclasses.fields(EXPECTED):
        value = getattr(EXPECTED, field.name)
        match field.name:
            case "layer_types":
                changed: Any = value[::-1]
            case "rope":
                changed = dataclasses.replace(value, truncate=True)
            case "eos_token_ids":
                assert dataclasses.replace(EXPECTED, eos_token_ids=()).fingerprint() in prints
                continue
            case "num_kv_heads" | "head_dim" | "num_heads":
                changed = 2 * value
            case _:
                changed = value + 1
        prints.add(dataclasses.replace(EXPECTED, **{field.name: changed}).fingerprint())
    assert len(prints) == len(dataclasses.fields(EXPECTED))
    assert all(len(p) == 64 and set(p) <= set("0123456789abcdef") for p in prints)


def test_load_config_reads_the_end_tokens_of_the_generation_config(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published()))
    assert load_config(tmp_path) == EXPECTED
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [200002, 199999, 200012]}))
    assert load_config(tmp_path).eos_token_ids == (200002, 199999, 200012)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_config(tmp_path).eos_token_ids == (200002,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not valid JSON"),
        ("[]", "holds list, not a JSON object"),
        ('{"a": 1, "a": 2}', "repeated keys: a"),
        ("{}", "model_type is missing"),
    ],
)
def test_load_config_names_the_file(tmp_path: pathlib.Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=rf"{tmp_path}/config\.json: .*{message}"):
        load_config(tmp_path)
