"""Text from a checkpoint, so that a person can see what was learned. One process; every token runs the whole model anew.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from raytrain3d.checkpoint.reader import Reader
from raytrain3d.data.tokenizer import BYTES, TOKENIZER, Tokenizer, open_tokenizer
from raytrain3d.errors import ConfigError
from raytrain3d.train.whole_model import WholeModel


def generate(model: WholeModel, prompt: Sequence[int], *, tokens: int, temperature: float, seed: int,
             end: int | None) -> Iterator[int]:
    """At most `tokens` ids that follow `prompt`, fewer where `end` comes. At temperature 0 always the likeliest one."""
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(tokens):
        # A table of positions has no more of them; the earliest tokens are then forgotten.
        context = ids if model.positions is None else ids[-model.positions :]
        token = _choose(model.next_logits(torch.tensor(context)).cpu(), temperature, generator)
        if token == end:
            return
        ids.append(token)
        yield token


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """logits: (vocabulary,)."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits.double() / temperature).softmax(dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def generate_text(reader: Reader, prompt: str, *, tokens: int, temperature: float, seed: int,
                  tokenizer: str | None = None) -> str:
    """What the model of a checkpoint writes after `prompt`. `tokenizer`: `bytes` or the path of a tokenizer.json instead
    of the one that the checkpoint's data was made with. ConfigError when there is no tokenizer, or not a fitting one."""
    found = open_tokenizer(tokenizer) if tokenizer is not None else checkpoint_tokenizer(reader)
    end = found.record.end_of_document
    ids = found.encode_text(prompt, special="data" not in reader.manifest.config) or [end]
    if max(ids) >= reader.model.vocabulary:
        raise ConfigError(f"the tokenizer {found.record.name!r} gives the token id {max(ids)}, the model's vocabulary has "
                          f"{reader.model.vocabulary}: give the right one with --tokenizer")
    model = WholeModel(reader, dtype=torch.float32, device=torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return found.decode(list(generate(model, ids, tokens=tokens, temperature=temperature, seed=seed, end=end)))


def checkpoint_tokenizer(reader: Reader) -> Tokenizer:
    """The tokenizer that lies beside an imported checkpoint, or the one that the run's data was made with."""
    data = reader.manifest.config.get("data", {})
    if data.get("tokenizer") == BYTES:
        return open_tokenizer(BYTES)
    if TOKENIZER in reader.folder.names():
        with reader.folder.reading(TOKENIZER) as path:
            return open_tokenizer(path)
    paths = [data["path"]] if data.get("path") else [source["path"] for source in data.get("sources", ())]
    places = [*(str(Path(path) / TOKENIZER) for path in paths), data["tokenizer"]] if data else []
    for place in places:
        if Path(place).is_file():
            return open_tokenizer(place)
    looked = " and ".join([f"beside {reader.folder.path}", *places])
    raise ConfigError(f"no tokenizer is there (looked {looked}): give --tokenizer, '{BYTES}' or the path of a "
                      "tokenizer.json")
