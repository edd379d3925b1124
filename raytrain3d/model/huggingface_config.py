"""`config.json` of a Hugging Face model <-> the keys of `model` that decide its shapes and what it computes.

Reads both styles, of transformers 4 (`rope_theta`, `rope_scaling`) and of 5 (`rope_parameters`), and refuses by name what
this model cannot compute. Defaults of absent keys are those of the classes in `transformers`. Needs nothing installed.
"""

import json
import os
from collections.abc import Mapping
from typing import Any, NoReturn

from raytrain3d.config import ModelConfig, RotaryScalingConfig
from raytrain3d.errors import CheckpointError, ConfigError

CONFIG = "config.json"
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                 "qwen3": "Qwen3ForCausalLM", "gpt2": "GPT2LMHeadModel"}
"""By `model_type`. SmolLM is a `llama`."""
KEYS = ("family", "vocabulary", "hidden", "blocks", "heads", "kv_heads", "head_size", "feed_forward", "positions",
        "norm_epsilon", "rotary_theta", "rotary_scaling", "qkv_bias", "qk_norm", "tied_embeddings")
"""Keys of `model` that a config.json decides."""
LARGEST = 1e30
"""No size or factor of a model is beyond this."""


def read_settings(directory: str) -> dict[str, Any]:
    """What config.json of a directory says. CheckpointError when there is none that can be read."""
    path = os.path.join(directory, CONFIG)
    return parse_settings(read_text(path), path)


def read_text(path: str) -> str:
    """The text of a file of a directory in the layout of Hugging Face; CheckpointError naming it if it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): name a directory that `save_pretrained` has "
                              "written") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not a text file (byte {error.start} is not UTF-8)") from None


def parse_settings(text: str, where: str) -> dict[str, Any]:
    """The mapping in a config.json; CheckpointError naming the file `where` if it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{where} holds no mapping of settings")
    return found


def model_config(settings: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that a config.json describes. CheckpointError naming the file `where` and the key, if it is another
    architecture or has a part that is not supported."""
    read = _Settings(settings, where)
    _check_architecture(read)
    try:
        return _gpt2(read) if settings["model_type"] == "gpt2" else _llama(read, settings["model_type"])
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


class _Settings:
    """Typed access to a config.json. A key that is null counts as absent, as in `transformers`."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values, self._where = values, where

    def refuse(self, key: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self._where}: {key} is {self._values.get(key)!r}: {why}")

    def has(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str, default: Any = None) -> Any:
        found = self._values.get(key)
        return default if found is None else found

    def whole(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        return found if type(found) is int else self.refuse(key, "a whole number is needed")

    def real(self, key: str, default: float | None = None) -> float:
        found = self.value(key, default)
        number = type(found) in (int, float) and -LARGEST < found < LARGEST
        return float(found) if number else self.refuse(key, "a number is needed")

    def flag(self, key: str, default: bool) -> bool:
        found = self.value(key, default)
        return found if isinstance(found, bool) else self.refuse(key, "true or false is needed")

    def mapping(self, key: str) -> "_Settings | None":
        found = self.value(key)
        if found is not None and not isinstance(found, dict):
            self.refuse(key, "a mapping is needed")
        return None if found is None else _Settings(found, f"{self._where}, {key}")

    def only(self, key: str, *supported: Any) -> None:
        """Only these values are supported; the first one is the default."""
        if self.value(key, supported[0]) not in supported:
            self.refuse(key, f"not supported, only {' and '.join(map(repr, supported))}")


def _check_architecture(read: _Settings) -> None:
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if read.value(key):
            read.refuse(key, "a mixture of experts is not supported")
    if read.value("quantization_config"):
        read.refuse("quantization_config", "quantized weights are not supported")
    kind = read.value("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        read.refuse("model_type", f"not supported, only {', '.join(ARCHITECTURES)}")
    base = f"{ARCHITECTURES[kind].removesuffix('ForCausalLM').removesuffix('LMHeadModel')}Model"
    if read.value("architectures", [base]) not in ([ARCHITECTURES[kind]], [base]):
        read.refuse("architectures", f"not supported, for model_type {kind!r} only {[ARCHITECTURES[kind]]}")


def _gpt2(read: _Settings) -> ModelConfig:
    read.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    read.only("scale_attn_weights", True)
    read.only("scale_attn_by_inverse_layer_idx", False)
    read.only("add_cross_attention", False)
    hidden = read.whole("n_embd")
    return ModelConfig(
        family="gpt2", vocabulary=read.whole("vocab_size"), hidden=hidden, blocks=read.whole("n_layer"),
        heads=read.whole("n_head"), feed_forward=read.whole("n_inner", 4 * hidden), positions=read.whole("n_positions"),
        norm_epsilon=read.real("layer_norm_epsilon", 1e-5), tied_embeddings=read.flag("tie_word_embeddings", True))


def _llama(read: _Settings, kind: str) -> ModelConfig:
    read.only("hidden_act", "silu", "swish")
    read.only("attention_bias", False)
    read.only("mlp_bias", False)
    _check_window(read, kind)
    heads = read.whole("num_attention_heads")
    head_size = read.value("head_dim", 128 if kind == "qwen3" else None)
    theta, scaling = _rotary(read)
    return ModelConfig(
        vocabulary=read.whole("vocab_size"), hidden=read.whole("hidden_size"), blocks=read.whole("num_hidden_layers"),
        heads=heads, kv_heads=read.whole("num_key_value_heads", heads),
        head_size=None if head_size is None else read.whole("head_dim", head_size),
        feed_forward=read.whole("intermediate_size"), norm_epsilon=read.real("rms_norm_eps", 1e-6), rotary_theta=theta,
        rotary_scaling=scaling, qkv_bias=kind == "qwen2", qk_norm=kind == "qwen3",
        tied_embeddings=read.flag("tie_word_embeddings", False))


def _check_window(read: _Settings, kind: str) -> None:
    """A window as wide as all positions, or one that is switched off, is not in use."""
    kinds = read.value("layer_types", [])
    if not isinstance(kinds, list) or any(each != "full_attention" for each in kinds):
        read.refuse("layer_types", "not supported, only 'full_attention' (no sliding window)")
    # An absent window of Mistral is the default of its class, while null is none.
    window = 4096 if kind == "mistral" and not read.has("sliding_window") else read.value("sliding_window")
    used = kind == "mistral" or read.flag("use_sliding_window", False)
    if used and window is not None and window < read.whole("max_position_embeddings"):
        read.refuse("sliding_window", "attention in a sliding window is not supported")


def _rotary(read: _Settings) -> tuple[float, RotaryScalingConfig | None]:
    """Base of the wavelengths, and Llama 3's scaling if it is used."""
    key = "rope_scaling" if read.value("rope_scaling") else "rope_parameters"
    rope = read.mapping(key) or _Settings({}, "")
    for each in (read, rope):
        each.only("partial_rotary_factor", 1.0)
    theta = rope.real("rope_theta", read.real("rope_theta", 10000.0))
    kind = rope.value("rope_type", rope.value("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        read.refuse(key, "of the rotary scalings only 'default' and 'llama3' are supported")
    return theta, RotaryScalingConfig(
        factor=rope.real("factor"), low_frequency_factor=rope.real("low_freq_factor"),
        high_frequency_factor=rope.real("high_freq_factor"),
        original_sequence=rope.whole("original_max_position_embeddings"))


def decided(model: ModelConfig) -> dict[str, Any]:
    """Value of each of KEYS, defaults filled in."""
    values = {key: getattr(model, key) for key in KEYS}
    return values | {"kv_heads": model.num_kv_heads, "head_size": model.size_of_head}


def settings_of(model: ModelConfig, *, sequence: int) -> dict[str, Any]:
    """A config.json for `model`, which `transformers` 4 and 5 read. `sequence`: positions that a llama may be used for.
    CheckpointError if no architecture there has these parts together."""
    if model.qkv_bias and model.qk_norm:
        raise CheckpointError("model.qkv_bias with model.qk_norm cannot be exported: no supported architecture of "
                              "transformers has both")
    common = {"vocab_size": model.vocabulary, "tie_word_embeddings": model.tied_embeddings,
              "initializer_range": model.initial_std, "bos_token_id": None, "eos_token_id": None}
    settings = _gpt2_settings(model, sequence) if model.family == "gpt2" else _llama_settings(model, sequence)
    return {"architectures": [ARCHITECTURES[settings["model_type"]]], **settings, **common}


def _gpt2_settings(model: ModelConfig, sequence: int) -> dict[str, Any]:
    return {"model_type": "gpt2", "n_embd": model.hidden, "n_layer": model.blocks, "n_head": model.heads,
            "n_inner": model.feed_forward, "n_positions": model.positions or sequence,
            "layer_norm_epsilon": model.norm_epsilon, "activation_function": "gelu_new", "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout, "attn_pdrop": model.attention_dropout}


def _llama_settings(model: ModelConfig, sequence: int) -> dict[str, Any]:
    if model.qk_norm or model.qkv_bias:
        kind = "qwen3" if model.qk_norm else "qwen2"
    else:
        # LlamaConfig wants the heads to divide the width; Mistral without its window is the same model.
        kind = "llama" if model.hidden % model.heads == 0 else "mistral"
    return {"model_type": kind, "hidden_size": model.hidden, "num_hidden_layers": model.blocks,
            "num_attention_heads": model.heads, "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.size_of_head, "intermediate_size": model.feed_forward, "hidden_act": "silu",
            "max_position_embeddings": sequence, "rms_norm_eps": model.norm_epsilon, "sliding_window": None,
            "attention_dropout": model.attention_dropout, **_rotary_settings(model)}


def _rotary_settings(model: ModelConfig) -> dict[str, Any]:
    """In both styles."""
    scaling = model.rotary_scaling
    scaled = None if scaling is None else {
        "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_frequency_factor,
        "high_freq_factor": scaling.high_frequency_factor,
        "original_max_position_embeddings": scaling.original_sequence}
    parameters = {"rope_type": "default", "rope_theta": model.rotary_theta, **(scaled or {})}
    return {"rope_theta": model.rotary_theta, "rope_scaling": scaled, "rope_parameters": parameters}
