"""Text files to token ids: the built-in byte tokenizer, or a `tokenizer.json` through the `tokenizers` package.

A tokenizer names the id that stands after each document.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from raytrain3d.data.manifest import TokenizerRecord
from raytrain3d.data.tokens import Tokens, checksum, token_type
from raytrain3d.errors import DataError

BYTES = "bytes"
TOKENIZER = "tokenizer.json"
"""Name of a dataset's own copy of the tokenizer that made it."""
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """What preparing data and generating text need."""

    vocabulary: int
    """Token ids are below this, the end of document included."""
    record: TokenizerRecord

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]:
        """The tokens of each text, UTF-8, without the end of document."""

    def encode_text(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text; `special`: with the tokens that the tokenizer itself puts around a text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; what is no text becomes a replacement character."""

    def save(self, directory: Path) -> None:
        """Leaves in a dataset directory what is needed to use it without the original file."""


class ByteTokenizer:
    """Ids 0 to 255 are bytes, 256 ends a document. Takes any file."""

    def __init__(self) -> None:
        self.vocabulary = 257
        self.record = TokenizerRecord(name=BYTES, fingerprint=BYTES, end_of_document=256)

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]:
        """Of any bytes."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def encode_text(self, text: str, *, special: bool) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def save(self, directory: Path) -> None:
        """Nothing: the tokenizer is built in."""


class JsonTokenizer:
    """A `tokenizer.json`. The end of document is its end-of-text token, or one id past its vocabulary if it has none.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._tokenizer = _load(file)
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        largest = max(ids.values(), default=0)
        end = next((ids[name] for name in _END_NAMES if name in ids), largest + 1)
        self.vocabulary = max(largest, end) + 1
        self.record = TokenizerRecord(name=Path(file).name, fingerprint=fingerprint(file), end_of_document=end)

    def encode_batch(self, texts: Sequence[bytes]) -> list[Tokens]:
        kind = token_type(self.vocabulary)
        encoded = self._tokenizer.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [np.array(each.ids, dtype=kind) for each in encoded]

    def encode_text(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids))
        return text

    def save(self, directory: Path) -> None:
        """A copy of the file, equal in every byte."""
        shutil.copyfile(self._file, directory / TOKENIZER)


def open_tokenizer(name: str) -> Tokenizer:
    """`bytes` or the path of a `tokenizer.json`. DataError when it cannot be used."""
    return ByteTokenizer() if name == BYTES else JsonTokenizer(name)


def fingerprint(name: str) -> str:
    """What a manifest holds to recognise the tokenizer of this name; needs no package."""
    if name == BYTES:
        return BYTES
    try:
        return checksum(Path(name))
    except OSError as error:
        raise DataError(f"data.tokenizer is '{name}': cannot be read ({error.strerror}); give '{BYTES}' or the path of "
                        "a tokenizer.json") from None


def require_tokenizers(what: str) -> Any:
    """The package. DataError that `what` needs it."""
    try:
        import tokenizers
    except ImportError:
        raise DataError(f"{what}: needs the tokenizers package (pip install tokenizers), '{BYTES}' works without") from None
    return tokenizers


def _load(file: str) -> Any:
    fingerprint(file)
    tokenizers = require_tokenizers(f"data.tokenizer is '{file}'")
    try:
        return tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # noqa: BLE001 - plain Exception is what the package raises for a bad file
        raise DataError(f"data.tokenizer is '{file}': not a tokenizer.json ({error})") from None
