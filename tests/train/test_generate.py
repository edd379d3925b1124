"""Text from a checkpoint: the likeliest tokens are those of `transformers`, and what is drawn depends on the seed alone."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain3d.checkpoint.convert_import import import_huggingface
from raytrain3d.checkpoint.reader import Reader
from raytrain3d.errors import ConfigError
from raytrain3d.train.generate import checkpoint_tokenizer, generate, generate_text
from raytrain3d.train.whole_model import WholeModel

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

WORDS = {"<s>": 0, "</s>": 1, "one": 2, "two": 3, "three": 4, "<unk>": 5}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small are not worth two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def gpt2(tmp_path: Path) -> tuple[Path, Any]:
    """An imported checkpoint with room for 24 positions, and the same model in `transformers`."""
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=24, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, tie_word_embeddings=False)).eval()
    model.save_pretrained(tmp_path / "model")
    import_huggingface(str(tmp_path / "model"), str(tmp_path / "checkpoint"), run="imported")
    return tmp_path / "checkpoint", model


def whole(checkpoint: Path) -> WholeModel:
    with Reader(str(checkpoint)) as reader:
        return WholeModel(reader, dtype=torch.float32, device=torch.device("cpu"))


def ids(model: WholeModel, **how: Any) -> list[int]:
    return list(generate(model, [5, 3, 8], **{"tokens": 20, "temperature": 0.0, "seed": 0, "end": None, **how}))


def tokenizer_file(path: Path) -> None:
    """Words, with <s> before a text that is encoded with special tokens."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.save(str(path))


def test_likeliest_tokens_are_those_of_transformers(gpt2: tuple[Path, Any]) -> None:
    ours, theirs = whole(gpt2[0]), gpt2[1]
    expected = theirs.generate(torch.tensor([[5, 3, 8]]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert ids(ours) == expected[0, 3:].tolist()
    assert ids(ours, seed=1) == ids(ours)
    assert len(set(ids(ours))) > 3


def test_end_of_document_ends_the_text(gpt2: tuple[Path, Any]) -> None:
    ours = whole(gpt2[0])
    everything = ids(ours)
    end = everything[4]
    assert ids(ours, end=end) == everything[: everything.index(end)]


def test_beyond_all_positions_the_earliest_tokens_are_forgotten(gpt2: tuple[Path, Any]) -> None:
    long = ids(whole(gpt2[0]), tokens=30)
    assert len(long) == 30
    with torch.no_grad():
        context = torch.tensor([[5, 3, 8, *long][-25:-1]])
        assert int(gpt2[1](input_ids=context).logits[0, -1].argmax()) == long[-1]


def test_seed_decides_what_is_drawn(gpt2: tuple[Path, Any]) -> None:
    ours = whole(gpt2[0])
    drawn = [ids(ours, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert ids(ours, temperature=1e-6) == ids(ours)


def test_tokens_are_drawn_as_often_as_the_model_says(gpt2: tuple[Path, Any]) -> None:
    ours, theirs = whole(gpt2[0]), gpt2[1]
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor([[5, 3, 8]])).logits[0, -1]
    probabilities = (logits / 2.0).softmax(dim=0)
    counts = Counter(ids(ours, tokens=1, temperature=2.0, seed=seed)[0] for seed in range(120))
    for token, probability in enumerate(probabilities.tolist()):
        assert abs(counts[token] / 120 - probability) < 4 * (probability / 120) ** 0.5 + 0.005


def test_imported_model_uses_the_tokenizer_that_came_along(gpt2: tuple[Path, Any]) -> None:
    checkpoint, _ = gpt2
    with Reader(str(checkpoint)) as reader:
        with pytest.raises(ConfigError, match="no tokenizer is there"):
            checkpoint_tokenizer(reader)
        tokenizer_file(checkpoint / "tokenizer.json")
        found = checkpoint_tokenizer(reader)
        assert found.encode_text("one two", special=True) == [0, 2, 3]
        assert found.encode_text("one two", special=False) == [2, 3]
        assert found.decode([2, 3]) == "one two"
        text = generate_text(reader, "one", tokens=5, temperature=0.0, seed=0)
        assert set(text.split()) <= set(WORDS)
        with pytest.raises(ConfigError, match=r"'bytes' gives the token id 111, the model's vocabulary has 40"):
            generate_text(reader, "one", tokens=5, temperature=0.0, seed=0, tokenizer="bytes")
