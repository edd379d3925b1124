"""Published models: imported they compute what `transformers` computes, exported they are the same to the bit."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from raytrain3d.checkpoint.convert_export import export_huggingface
from raytrain3d.checkpoint.convert_import import import_huggingface
from raytrain3d.checkpoint.huggingface import HuggingFaceWeights
from raytrain3d.checkpoint.reader import Reader
from raytrain3d.errors import CheckpointError
from raytrain3d.model.huggingface_config import model_config, settings_of
from raytrain3d.plan.params import Rectangle
from raytrain3d.train.whole_model import WholeModel

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8}
GPT2 = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """A model of `transformers`, by the names of its classes and its settings."""

    name: str
    architecture: str
    settings: dict[str, Any]
    style: int = 5
    """Of its config.json: as version 4 or 5 of transformers writes it."""

    def make(self) -> nn.Module:
        """With random norms and biases too, which a fresh model does not have."""
        torch.manual_seed(0)
        settings = getattr(transformers, self.name + "Config")(**self.settings)
        model: nn.Module = getattr(transformers, self.architecture)(settings).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                norm = "norm" in name or "ln_" in name
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (1.0 if norm and name.endswith("weight") else 0.0))
        return model

    def save(self, directory: Path, **how: Any) -> nn.Module:
        model = self.make()
        model.save_pretrained(directory, **how)
        if self.style == 4:
            change_settings(directory, **in_style_of_4(read_settings(directory)))
        return model


FAMILIES = {
    "llama-2": Family("Llama", "LlamaForCausalLM", SIZES | {"num_key_value_heads": 4}, style=4),
    "llama-3": Family("Llama", "LlamaForCausalLM", SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama-3.1": Family("Llama", "LlamaForCausalLM", SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "llama-3.2-style-4": Family("Llama", "LlamaForCausalLM",
                                SIZES | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}, style=4),
    "mistral": Family("Mistral", "MistralForCausalLM", SIZES | {"sliding_window": None, "head_dim": 8}),
    "qwen2": Family("Qwen2", "Qwen2ForCausalLM", SIZES | {"tie_word_embeddings": True}),
    "qwen2-style-4": Family("Qwen2", "Qwen2ForCausalLM", SIZES, style=4),
    "qwen3": Family("Qwen3", "Qwen3ForCausalLM", SIZES | {"head_dim": 16}),
    "smollm": Family("Llama", "LlamaForCausalLM", SIZES | {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "gpt2": Family("GPT2", "GPT2LMHeadModel", GPT2),
    "gpt2-untied": Family("GPT2", "GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False, "n_inner": 72}),
}


def read_settings(directory: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return settings


def change_settings(directory: Path, **changes: Any) -> None:
    """Keys whose new value is ... are taken out."""
    settings = read_settings(directory) | changes
    (directory / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not ...}))


def in_style_of_4(settings: dict[str, Any]) -> dict[str, Any]:
    rope = dict(settings["rope_parameters"])
    theta = rope.pop("rope_theta")
    return {"rope_parameters": ..., "rope_theta": theta, "rope_scaling": rope if rope["rope_type"] != "default" else None,
            "dtype": ..., "torch_dtype": settings["dtype"]}


def tensors(directory: Path) -> dict[str, Tensor]:
    return {name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype
        assert torch.equal(value, right[name]), name


def whole(checkpoint: Path) -> WholeModel:
    with Reader(str(checkpoint)) as reader:
        return WholeModel(reader, dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are not worth two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FAMILIES)
def test_family_computes_the_same_and_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    theirs = FAMILIES[name].save(tmp_path / "in", max_shard_size="12KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    import_huggingface(str(tmp_path / "in"), str(tmp_path / "checkpoint"), run="imported")

    tokens = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(1))  # beyond the 16 positions of a llama
    mask = torch.ones_like(tokens)
    mask[1, 27:] = 0
    with torch.no_grad():
        expected = theirs(input_ids=tokens, attention_mask=mask).logits
    ours = whole(tmp_path / "checkpoint").logits(tokens)
    torch.testing.assert_close(ours[mask == 1], expected[mask == 1], atol=1e-5, rtol=0)

    export_huggingface(str(tmp_path / "checkpoint"), str(tmp_path / "out"), shard_bytes=12_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert_same_bits(tensors(tmp_path / "in"), tensors(tmp_path / "out"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(theirs)
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.settings.get("tie_word_embeddings")]
                         + ["gpt2"])
def test_tied_model_is_exported_without_a_second_head(name: str, tmp_path: Path) -> None:
    FAMILIES[name].save(tmp_path / "in")
    import_huggingface(str(tmp_path / "in"), str(tmp_path / "checkpoint"), run="imported")
    export_huggingface(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    assert "lm_head.weight" not in tensors(tmp_path / "out")


@pytest.mark.parametrize("name", ["llama-3.1", "mistral", "qwen2", "qwen3", "gpt2"])
def test_config_is_made_when_none_came_along(name: str, tmp_path: Path) -> None:
    theirs = FAMILIES[name].save(tmp_path / "in")
    import_huggingface(str(tmp_path / "in"), str(tmp_path / "checkpoint"), run="imported")
    (tmp_path / "checkpoint" / "config.json").unlink()
    export_huggingface(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=tokens).logits, theirs(input_ids=tokens).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_settings_are_read_as_they_are_written(name: str, tmp_path: Path) -> None:
    FAMILIES[name].save(tmp_path)
    model = model_config(read_settings(tmp_path), "config.json")
    assert model_config(settings_of(model, sequence=16), "config.json") == model_config(
        settings_of(model, sequence=99) | ({"n_positions": 40} if model.family == "gpt2" else {}), "config.json")
    assert model.rotary_scaling is None or model.rotary_scaling.original_sequence == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_keep_their_type(dtype: torch.dtype, tmp_path: Path) -> None:
    FAMILIES["gpt2"].make().to(dtype).save_pretrained(tmp_path / "in")
    import_huggingface(str(tmp_path / "in"), str(tmp_path / "checkpoint"), run="imported")
    export_huggingface(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    assert_same_bits(tensors(tmp_path / "in"), tensors(tmp_path / "out"))
    assert read_settings(tmp_path / "out")["dtype"] == str(dtype).removeprefix("torch.")


def test_file_of_a_model_without_head_and_with_old_buffers(tmp_path: Path) -> None:
    """As the first GPT-2 was published: names without a prefix, masks among the weights."""
    FAMILIES["gpt2"].save(tmp_path / "in")
    before = tensors(tmp_path / "in")
    bare = {name.removeprefix("transformer."): value.clone() for name, value in before.items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 40, 40) for i in range(2)}
    save_file(bare, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    import_huggingface(str(tmp_path / "in"), str(tmp_path / "checkpoint"), run="imported")
    export_huggingface(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    assert_same_bits(before, tensors(tmp_path / "out"))


def test_companions_are_carried_along(tmp_path: Path) -> None:
    FAMILIES["llama-2"].save(tmp_path / "in")
    for name in ("tokenizer.json", "merges.txt", "notes.md"):
        (tmp_path / "in" / name).write_text(name)
    import_huggingface(str(tmp_path / "in"), str(tmp_path / "checkpoint"), run="imported")
    export_huggingface(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    carried = {path.name for path in (tmp_path / "out").iterdir()}
    assert carried == {"config.json", "generation_config.json", "tokenizer.json", "merges.txt", "model.safetensors"}
    assert (tmp_path / "out" / "merges.txt").read_text() == "merges.txt"


@pytest.mark.parametrize("name", ["llama-2", "gpt2"])
def test_any_rectangle_is_read_alone(name: str, tmp_path: Path) -> None:
    FAMILIES[name].save(tmp_path / "in")
    weights = HuggingFaceWeights(str(tmp_path / "in"))
    for parameter, shape in weights.parameters.items():
        everything = weights.read(parameter, Rectangle(offset=(0,) * len(shape), shape=shape))
        part = Rectangle(offset=tuple(n // 3 for n in shape), shape=tuple(n // 2 for n in shape))
        inner = tuple(slice(n // 3, n // 3 + n // 2) for n in shape)
        assert torch.equal(weights.read(parameter, part), everything[inner]), parameter
        nothing = Rectangle(offset=shape, shape=(0, *shape[1:]))
        assert weights.read(parameter, nothing).shape == nothing.shape


def peak_kib(action: Callable[[], object]) -> int:
    """How much more memory `action` has held at once than was held before, in KiB."""
    def status(key: str) -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                    if line.startswith(key))
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    except OSError:
        pytest.skip("the kernel does not let this process reset its peak memory")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def test_memory_holds_few_layers(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "n_embd": 256, "n_layer": 16, "n_head": 4, "n_positions": 16}
    Family("GPT2", "GPT2LMHeadModel", GPT2 | sizes).save(tmp_path / "in")
    model = (tmp_path / "in" / "model.safetensors").stat().st_size >> 10
    FAMILIES["gpt2"].save(tmp_path / "small")
    import_huggingface(str(tmp_path / "small"), str(tmp_path / "warm-up"), run="imported")
    assert peak_kib(lambda: import_huggingface(str(tmp_path / "in"), str(tmp_path / "out"), run="imported")) < model / 3
    assert peak_kib(lambda: export_huggingface(str(tmp_path / "out"), str(tmp_path / "again"))) < model / 3
    everything = peak_kib(lambda: [value.clone() for value in tensors(tmp_path / "again").values()])
    assert everything > model / 2  # the measure sees a whole model
    assert_same_bits(tensors(tmp_path / "in"), tensors(tmp_path / "again"))


# What is refused


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a family, written once."""
    def directory(name: str) -> Path:
        place = tmp_path_factory.getbasetemp() / f"saved-{name}"
        if not place.exists():
            FAMILIES[name].save(place)
        return place
    return directory


def refused(directory: Path) -> str:
    """The message with which the import is refused; nothing may look like a checkpoint after it."""
    with pytest.raises(CheckpointError) as caught:
        import_huggingface(str(directory), str(directory.parent / "refused"), run="imported")
    assert not (directory.parent / "refused" / "manifest.json").exists()
    return str(caught.value)


@pytest.mark.parametrize(("name", "changes", "key"), [
    ("llama-2", {"model_type": "mamba"}, "model_type is 'mamba'"),
    ("llama-2", {"model_type": ...}, "model_type is None"),
    ("llama-2", {"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
    ("mistral", {"model_type": "mixtral", "num_local_experts": 8}, "num_local_experts is 8: a mixture of experts"),
    ("qwen3", {"model_type": "qwen3_moe", "num_experts": 128}, "num_experts is 128: a mixture of experts"),
    ("llama-2", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("mistral", {"sliding_window": 8}, "sliding_window is 8"),
    ("mistral", {"sliding_window": ..., "max_position_embeddings": 32768}, "sliding_window is None"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ...}, "sliding_window is 8"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ("llama-2", {"attention_bias": True}, "attention_bias is True"),
    ("qwen3", {"attention_bias": True}, "attention_bias is True"),
    ("llama-2", {"mlp_bias": True}, "mlp_bias is True"),
    ("llama-2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
    ("llama-2", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is {'type': 'linear'"),
    ("llama-3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters is"),
    ("llama-3.1", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "factor is None"),
    ("llama-3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ("llama-2", {"num_attention_heads": 5}, "model.kv_heads is 4: must divide"),
    ("llama-2", {"num_attention_heads": 5, "head_dim": ...}, "model.heads is 5: must divide"),
    ("llama-2", {"hidden_size": "24"}, "hidden_size is '24': a whole number"),
    ("llama-2", {"hidden_size": ...}, "hidden_size is None"),
    ("llama-2", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ("llama-2", {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    ("llama-2", {"rope_parameters": 7}, "rope_parameters is 7"),
    ("llama-2", {"num_hidden_layers": 10**12}, "there are 1000000000000 blocks, the weights are of 2"),
    ("llama-2", {"vocab_size": 10**12}, "has shape (61, 24)"),
    ("llama-2", {"intermediate_size": 41}, "mlp.gate_proj.weight has shape (40, 24)"),
    ("llama-2", {"tie_word_embeddings": True}, "lm_head.weight differs from the embedding"),
    ("qwen2", {"tie_word_embeddings": False}, "the tensor lm_head.weight is missing"),
    ("llama-2", {"model_type": "qwen2", "architectures": ...}, "q_proj.bias is missing"),
    ("qwen2", {"model_type": "llama", "architectures": ...}, "k_proj.bias is no tensor of a llama model"),
])
def test_unsupported_settings_are_named(name: str, changes: dict[str, Any], key: str, saved: Callable[[str], Path],
                                           tmp_path: Path) -> None:
    shutil.copytree(saved(name), tmp_path / "in")
    change_settings(tmp_path / "in", **changes)
    assert key in refused(tmp_path / "in")


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "\udcff"])
def test_config_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    FAMILIES["llama-2"].save(tmp_path / "in")
    (tmp_path / "in" / "config.json").write_text(text, errors="surrogateescape")
    assert "config.json" in refused(tmp_path / "in")


def test_missing_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    FAMILIES["llama-2"].save(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    found = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in found.items() if key != name}, file)
    assert f"the tensor {name} is missing" in refused(tmp_path / "in")
    save_file(found | {"model.layers.1.mlp.router.weight": torch.ones(2)}, file)
    assert "model.layers.1.mlp.router.weight is no tensor" in refused(tmp_path / "in")
    save_file(found | {name: torch.ones(40, 24, dtype=torch.int8)}, file)
    assert f"{name} has type I8" in refused(tmp_path / "in")
    file.write_bytes(file.read_bytes()[:-8])
    assert "model.safetensors cannot be read" in refused(tmp_path / "in")
    file.unlink()
    assert "holds neither model.safetensors nor" in refused(tmp_path / "in")
    (tmp_path / "in" / "pytorch_model.bin").write_bytes(b"\x80\x02}.")
    assert "pytorch_model.bin, a pickle" in refused(tmp_path / "in")
    assert "cannot be read" in refused(tmp_path / "nowhere")


@pytest.mark.parametrize("file", ["../secret.safetensors", "/secret.safetensors", "a/b.safetensors", "..", ".safetensors",
                                  "model.bin", 3, "a\0.safetensors", "gone.safetensors"])
def test_index_cannot_lead_elsewhere(file: object, tmp_path: Path) -> None:
    FAMILIES["llama-2"].save(tmp_path / "in", max_shard_size="12KB")
    save_file({"lm_head.weight": torch.ones(61, 24)}, tmp_path / "secret.safetensors")
    index = json.loads((tmp_path / "in" / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = file
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refused(tmp_path / "in")
    assert repr(file) in message or "gone.safetensors cannot be read" in message


def test_index_that_says_what_is_not_so_is_refused(tmp_path: Path) -> None:
    FAMILIES["llama-2"].save(tmp_path / "in", max_shard_size="12KB")
    path = tmp_path / "in" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    there = index["weight_map"]["model.norm.weight"]
    other = next(file for file in index["weight_map"].values() if file != there)
    path.write_text(json.dumps({"weight_map": index["weight_map"] | {"model.norm.weight": other}}))
    assert f"{other}: the tensor model.norm.weight is missing" in refused(tmp_path / "in")
    path.write_text(json.dumps({"weight_map": []}))
    assert "has no weight_map" in refused(tmp_path / "in")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    FAMILIES["llama-2"].save(tmp_path / "in")
    with pytest.raises(CheckpointError, match=r"already holds model\.safetensors"):
        import_huggingface(str(tmp_path / "in"), str(tmp_path / "in"), run="imported")
    import_huggingface(str(tmp_path / "in"), str(tmp_path / "checkpoint"), run="imported")
    with pytest.raises(CheckpointError, match=r"already holds manifest\.json"):
        import_huggingface(str(tmp_path / "in"), str(tmp_path / "checkpoint"), run="imported")
    with pytest.raises(CheckpointError, match="already exists"):
        export_huggingface(str(tmp_path / "checkpoint"), str(tmp_path / "in"))
    (tmp_path / "checkpoint" / "rank-0001.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"rank-0001\.safetensors has 0 bytes"):
        export_huggingface(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "in"]
