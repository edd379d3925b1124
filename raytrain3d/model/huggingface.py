"""Where each parameter lies in a Hugging Face model, in both directions from one table.

A tensor there is one of our parameters, or several with their rows one after the other (GPT-2's query, key and value);
GPT-2 keeps its matrices transposed. Needs nothing installed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from raytrain3d.config import ModelConfig

HEAD = "lm_head.weight"
PREFIXES = {"llama": "model.", "gpt2": "transformer."}
"""Begin of every name but the head's; left out in files of a model without a head."""
_NAMES = {
    "llama": {"embedding.tokens": "embed_tokens", "tied.tokens": "embed_tokens", "head.norm": "norm",
              "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
              "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj",
              "attention.value": "self_attn.v_proj", "attention.output": "self_attn.o_proj",
              "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
              "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj"},
    "gpt2": {"embedding.tokens": "wte", "tied.tokens": "wte", "embedding.positions": "wpe", "head.norm": "ln_f",
             "attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.query": "attn.c_attn",
             "attention.key": "attn.c_attn", "attention.value": "attn.c_attn", "attention.output": "attn.c_proj",
             "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}}
_BLOCKS = {"llama": "layers", "gpt2": "h"}
# Not weights: masks and frequencies that old files hold.
_BUFFERS = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias|model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceTensor:
    """One tensor of a Hugging Face model."""

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    """Global name and shape of the parameters whose rows it holds, one after the other."""
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor as it is stored there."""
        whole = (sum(shape[0] for _, shape in self.parts), *self.parts[0][1][1:])
        return whole[::-1] if self.transposed else whole

    def first_row(self, part: str) -> int:
        """Rows of the parts before the parameter `part`."""
        names = [name for name, _ in self.parts]
        return sum(shape[0] for _, shape in self.parts[: names.index(part)])


def huggingface_tensors(model: ModelConfig, parameters: Mapping[str, tuple[int, ...]]) -> tuple[HuggingFaceTensor, ...]:
    """What a Hugging Face model consists of, from global names and shapes of the parameters of `model`."""
    parts: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in parameters.items():
        parts.setdefault(_name_there(model.family, name), []).append((name, shape))
    return tuple(HuggingFaceTensor(name=name, parts=tuple(found), transposed=_is_transposed(model, *found[0]))
                 for name, found in parts.items())


def _name_there(family: str, name: str) -> str:
    """`model.layers.3.self_attn.q_proj.weight` for `blocks.3.attention.query.weight`."""
    if name == "head.output.weight":
        return HEAD
    path, _, leaf = name.rpartition(".")
    block = re.fullmatch(r"blocks\.(\d+)\.(.+)", path)
    place = f"{_BLOCKS[family]}.{block[1]}." if block else ""
    return f"{PREFIXES[family]}{place}{_NAMES[family][block[2] if block else path]}.{leaf}"


def _is_transposed(model: ModelConfig, name: str, shape: tuple[int, ...]) -> bool:
    """GPT-2's linear layers are written (in, out)."""
    return model.family == "gpt2" and name.startswith("blocks.") and len(shape) == 2


def canonical_name(family: str, name: str) -> str:
    """The name with its prefix, which files of a model without a head leave out."""
    prefix = PREFIXES[family]
    return name if name == HEAD or name.startswith(prefix) else prefix + name


def is_left_out(model: ModelConfig, name: str) -> bool:
    """Whether a file may hold the tensor of this canonical name though it is no parameter of `model`."""
    return _BUFFERS.fullmatch(name) is not None or (name == HEAD and model.tied_embeddings)


def num_blocks(family: str, names: Mapping[str, object]) -> int:
    """Blocks that tensors with these canonical names belong to."""
    pattern = re.compile(rf"{re.escape(PREFIXES[family] + _BLOCKS[family])}\.(\d+)\.")
    return len({match[1] for name in names if (match := pattern.match(name))})
