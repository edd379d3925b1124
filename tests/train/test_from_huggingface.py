"""Runs that start from a published model, under any layout: the first loss is the one `transformers` computes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import JobRunner, SyntheticLoader, small_job

from raytrain3d.checkpoint.convert_import import import_huggingface
from raytrain3d.config import JobConfig, RotaryScalingConfig
from raytrain3d.errors import CheckpointError, ConfigError
from raytrain3d.load import dump, load
from raytrain3d.model.huggingface_config import decided, model_config
from raytrain3d.plan.plan import make_plan
from raytrain3d.train.trainer import Trainer

transformers = pytest.importorskip("transformers")

LAYOUTS: list[dict[str, int]] = [{}, {"pipeline": 2, "tensor": 2}, {"data": 2, "tensor": 2}]
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "GPT2": {"vocab_size": 101, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}}


def save(kind: str, directory: Path) -> torch.nn.Module:
    """A random model with biases that are not zero, in directory/model."""
    torch.manual_seed(0)
    classes = {"Qwen2": "Qwen2ForCausalLM", "GPT2": "GPT2LMHeadModel"}
    model = getattr(transformers, classes[kind])(getattr(transformers, kind + "Config")(**MODELS[kind]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    model.save_pretrained(directory / "model")
    found: torch.nn.Module = model
    return found


def job(directory: Path, mesh: dict[str, int], **model: Any) -> JobConfig:
    settings = json.loads((directory / "model" / "config.json").read_text())
    shape = decided(model_config(settings, "config.json")) | {"vocabulary_multiple": 4, **model}
    sharding = "optimizer" if mesh.get("data", 1) > 1 else "none"
    return small_job(model=shape, mesh=mesh, train={"dtype": "fp32", "sharding": sharding})


def load_into(directory: str, trainer: Trainer) -> None:
    for state in trainer.states.values():
        for piece in state.pieces():
            piece.tensor.fill_(7.0)
    trainer.load(directory)
    moments = [piece.tensor for state in trainer.states.values() for piece in state.pieces() if piece.kind != "weight"]
    assert moments
    assert not any(bool(moment.any()) for moment in moments)


def first_loss(config: JobConfig, reference: torch.nn.Module) -> float:
    loader = SyntheticLoader(config, make_plan(config), 0)
    samples = [loader.sample(1, k) for k in range(config.train.global_batch)]
    tokens, targets = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
    with torch.no_grad():
        logits = reference.eval()(input_ids=tokens).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.mark.dist
@pytest.mark.parametrize("kind", MODELS)
def test_run_starts_from_the_model_at_any_layout(run_job: JobRunner, kind: str, tmp_path: Path) -> None:
    theirs = save(kind, tmp_path)
    import_huggingface(str(tmp_path / "model"), str(tmp_path / "checkpoint"), run="test")
    alone: list[float] | None = None
    for mesh in LAYOUTS:
        config = job(tmp_path, mesh, from_huggingface=str(tmp_path / "model"))
        losses = [report.loss for report in run_job(config, 3)[0][0]]
        assert losses[0] == pytest.approx(first_loss(config, theirs), rel=1e-5)
        alone = alone or losses
        assert losses == pytest.approx(alone, rel=1e-5)
        imported = run_job(job(tmp_path, mesh), 3, before=partial(load_into, str(tmp_path / "checkpoint")))
        assert [report.loss for report in imported[0][0]] == losses


def test_model_that_has_changed_meanwhile_is_refused(run_job: JobRunner, tmp_path: Path) -> None:
    save("GPT2", tmp_path)
    config = job(tmp_path, {}, from_huggingface=str(tmp_path / "model"), norm_epsilon=1e-3)
    with pytest.raises(CheckpointError, match="does not hold the model of this job any more"):
        run_job(config, 1)


# The configuration

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 32,
         "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "rms_norm_eps": 1e-6, "rope_theta": 5e5, "tie_word_embeddings": True,
         "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 8192}}


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    """A job that says of its model only where it comes from."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "job.yaml").write_text(
        f"run: {{name: tuned}}\nmodel: {{from_huggingface: '{tmp_path}/llama', dropout: 0.1}}\n"
        "train: {steps: 2, global_batch: 2, sequence: 16}\ndata: {path: nowhere}\n")
    return str(tmp_path / "job.yaml")


def test_shape_comes_from_the_model(job_file: str, tmp_path: Path) -> None:
    model = load(job_file).model
    assert (model.vocabulary, model.hidden, model.blocks, model.num_kv_heads, model.feed_forward) == (300, 32, 2, 2, 48)
    assert (model.norm_epsilon, model.rotary_theta, model.tied_embeddings, model.dropout) == (1e-6, 5e5, True, 0.1)
    assert model.rotary_scaling == RotaryScalingConfig(factor=32.0)
    agreeing = ["model.blocks=2", "model.rotary_theta=5e5", "model.kv_heads=2", "model.rotary_scaling.factor=32"]
    assert load(job_file, agreeing).model == model
    # A run directory's copy, which gives every key, can be read when the model has gone.
    (tmp_path / "copy.yaml").write_text(dump(load(job_file)))
    (tmp_path / "llama" / "config.json").unlink()
    (tmp_path / "llama").rmdir()
    assert load(str(tmp_path / "copy.yaml")).model == model


@pytest.mark.parametrize(("override", "key", "given", "there"), [
    ("model.blocks=3", "model.blocks", "3", "2"),
    ("model.family=gpt2", "model.family", "'gpt2'", "'llama'"),
    ("model.heads=5", "model.heads", "5", "4"),
    ("model.tied_embeddings=false", "model.tied_embeddings", "False", "True"),
    ("model.rotary_scaling.factor=8", "model.rotary_scaling", "RotaryScalingConfig(factor=8.0", "factor=32.0"),
])
def test_contradictions_name_both_values(job_file: str, override: str, key: str, given: str, there: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(job_file, [override])
    assert str(caught.value).startswith(f"{key} is {given}")
    assert there in str(caught.value).partition("has ")[2]


@pytest.mark.parametrize(("override", "message"), [
    ("model.from_huggingface=/nowhere", "model.from_huggingface is '/nowhere': /nowhere/config.json cannot be read"),
    ("model.from_huggingface=3", "model.from_huggingface is 3: must be a string"),
    ("model.blocks=x", "model.blocks is 'x': must be a whole number"),
])
def test_bad_values_are_named(job_file: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(job_file, [override])
    assert str(caught.value).startswith(message)


def test_unsupported_model_is_a_config_error(job_file: str, tmp_path: Path) -> None:
    (tmp_path / "llama" / "config.json").write_text(json.dumps(LLAMA | {"attention_bias": True}))
    with pytest.raises(ConfigError, match=r"model\.from_huggingface is .*attention_bias is True"):
        load(job_file)
