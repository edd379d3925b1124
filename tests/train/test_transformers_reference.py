"""The independent reference: the same weights in `transformers`, trained by a plain loop with torch's own optimizer."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import SyntheticLoader, small_job
from torch import Tensor, nn

from raytrain3d.config import JobConfig
from raytrain3d.parallel.groups import serve_store
from raytrain3d.plan.plan import make_plan
from raytrain3d.train.lr import learning_rate
from raytrain3d.train.trainer import Trainer

transformers = pytest.importorskip("transformers")

LLAMA = {"embedding.tokens": "model.embed_tokens", "head.norm": "model.norm", "head.output": "lm_head",
         "tied.tokens": "model.embed_tokens", "attention_norm": "input_layernorm",
         "mlp_norm": "post_attention_layernorm", "attention.query": "self_attn.q_proj",
         "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
         "attention.output": "self_attn.o_proj", "attention.query_norm": "self_attn.q_norm",
         "attention.key_norm": "self_attn.k_norm", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
         "mlp.down": "mlp.down_proj"}
GPT2 = {"tied.tokens": "transformer.wte", "embedding.positions": "transformer.wpe", "head.norm": "transformer.ln_f",
        "attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj"}


def parameters(trainer: Trainer) -> Iterator[tuple[str, str, Tensor]]:
    """(layer name, parameter name, values without padding)."""
    for state in trainer.states.values():
        for slot in state.layout.slots:
            rows = slot.param.shape[0]
            yield state.spec.name, slot.param.name, state.parameters[slot.param.name].detach()[:rows]


def copy_into_llama(trainer: Trainer, reference: nn.Module) -> None:
    with torch.no_grad():
        for layer, name, values in parameters(trainer):
            path, _, leaf = name.rpartition(".")
            block = f"model.layers.{layer.removeprefix('blocks.')}." if layer.startswith("blocks") else ""
            key = block + LLAMA[path if block else f"{layer}.{path}"]
            reference.get_parameter(f"{key}.{leaf}").copy_(values)


def copy_into_gpt2(trainer: Trainer, reference: nn.Module) -> None:
    """GPT-2 there keeps matrices transposed, and query, key and value as one."""
    fused: dict[str, dict[str, Tensor]] = {}
    with torch.no_grad():
        for layer, name, values in parameters(trainer):
            path, _, leaf = name.rpartition(".")
            block = f"transformer.h.{layer.removeprefix('blocks.')}." if layer.startswith("blocks") else ""
            part = path.removeprefix("attention.")
            if part in ("query", "key", "value"):
                fused.setdefault(f"{block}attn.c_attn.{leaf}", {})[part] = values
                continue
            key = block + GPT2[path if block else f"{layer}.{path}"]
            matrix = bool(block) and values.ndim == 2
            reference.get_parameter(f"{key}.{leaf}").copy_(values.t() if matrix else values)
        for key, parts in fused.items():
            joined = torch.cat([parts[p] for p in ("query", "key", "value")])
            reference.get_parameter(key).copy_(joined.t() if joined.ndim == 2 else joined)


def reference_steps(config: JobConfig, model: nn.Module, steps: int) -> Iterator[tuple[float, float]]:
    """(loss, gradient norm) of each step of the plain loop."""
    plan, settings = make_plan(config), config.optimizer
    loader = SyntheticLoader(config, plan, 0)
    tables = ("embed_tokens", "wte", "wpe")
    def decays(name: str, p: Tensor) -> bool:
        return p.ndim == 2 and not any(table in name for table in tables)
    groups = [{"params": [p for n, p in model.named_parameters() if decays(n, p)], "weight_decay": settings.weight_decay},
              {"params": [p for n, p in model.named_parameters() if not decays(n, p)], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), eps=settings.epsilon)
    for n in range(1, steps + 1):
        samples = [loader.sample(n, k) for k in range(config.train.global_batch)]
        tokens, targets = torch.stack([s[0] for s in samples]), torch.stack([s[1] for s in samples])
        logits = model(input_ids=tokens).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.learning_rate, n, config.train.steps)
        optimizer.step()
        yield loss.item(), norm.item()


def compare(config: JobConfig, reference: nn.Module, copy: Any) -> None:
    trainer = Trainer(config, make_plan(config), 0, loader=SyntheticLoader(config, make_plan(config), 0))
    store = serve_store("127.0.0.1", 0)
    trainer.connect("127.0.0.1", store.port, 0)
    trainer.initialize()
    copy(trainer, reference)
    for n, (loss, norm) in enumerate(reference_steps(config, reference, config.train.steps), start=1):
        report = trainer.step(n)
        assert report.loss == pytest.approx(loss, rel=1e-5), f"loss of step {n}"
        assert report.gradient_norm == pytest.approx(norm, rel=1e-5), f"gradient norm of step {n}"
    trainer.close()


def common(config: JobConfig) -> dict[str, Any]:
    model = config.model
    return {"vocab_size": model.vocabulary, "hidden_size": model.hidden, "intermediate_size": model.feed_forward,
            "num_hidden_layers": model.blocks, "num_attention_heads": model.heads,
            "num_key_value_heads": model.num_kv_heads, "head_dim": model.size_of_head, "rms_norm_eps": model.norm_epsilon,
            "tie_word_embeddings": model.tied_embeddings, "max_position_embeddings": 64, "attention_dropout": 0.0}


def fp32(**model: Any) -> JobConfig:
    config = small_job(model=model, train={"dtype": "fp32", "micro_batch": 2})
    return replace(config, learning_rate=replace(config.learning_rate, peak=1e-3))


@pytest.mark.parametrize("tied", [False, True])
def test_llama_trains_as_in_transformers(tied: bool) -> None:
    config = fp32(tied_embeddings=tied)
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(**common(config), rope_theta=10000.0))
    compare(config, reference, copy_into_llama)


def test_llama_3_rotary_scaling_as_in_transformers() -> None:
    from raytrain3d.config import RotaryScalingConfig

    scaling = RotaryScalingConfig(factor=4.0, original_sequence=8)
    config = fp32(rotary_scaling=scaling, rotary_theta=100.0)
    rope = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8, "rope_theta": 100.0}
    settings = transformers.LlamaConfig(**common(config), rope_parameters=rope)
    compare(config, transformers.LlamaForCausalLM(settings), copy_into_llama)


def test_qwen3_trains_as_in_transformers() -> None:
    config = fp32(qk_norm=True, head_size=16)
    reference = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common(config)))
    compare(config, reference, copy_into_llama)


def test_qwen2_trains_as_in_transformers() -> None:
    config = fp32(qkv_bias=True, tied_embeddings=True)
    reference = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common(config)))
    compare(config, reference, copy_into_llama)


def test_gpt2_trains_as_in_transformers() -> None:
    config = fp32(family="gpt2", kv_heads=8, tied_embeddings=True)
    model = config.model
    settings = transformers.GPT2Config(
        vocab_size=model.vocabulary, n_positions=config.train.sequence, n_embd=model.hidden, n_layer=model.blocks,
        n_head=model.heads, n_inner=model.feed_forward, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    compare(config, transformers.GPT2LMHeadModel(settings), copy_into_gpt2)
