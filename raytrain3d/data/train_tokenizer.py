"""A byte-level BPE tokenizer, trained on the files that a data set is prepared from."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from raytrain3d.data.documents import find_inputs
from raytrain3d.data.pieces import cut
from raytrain3d.data.prepare import PIECE_BYTES
from raytrain3d.data.records import Reading, Record, read_piece
from raytrain3d.data.tokenizer import require_tokenizers
from raytrain3d.errors import DataError

END = "<|endoftext|>"


def train_tokenizer(text: Sequence[str], output: str, *, vocabulary: int, column: str = "text", longest: int = 64 << 20,
                    max_bytes: int = 1 << 30) -> int:
    """Writes a `tokenizer.json` of at most `vocabulary` ids, trained on the first `max_bytes` of text taken from all
    over the input. Returns the number of ids. DataError for bad input, or an output that is there."""
    tokenizers = require_tokenizers("data train-tokenizer")
    smallest = 256 + 1
    if vocabulary < smallest:
        raise DataError(f"--vocabulary is {vocabulary}: at least {smallest} ids are needed, for all bytes and {END}")
    if Path(output).exists():
        raise DataError(f"--output {output!r} already exists: remove it or name another file")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[END], show_progress=False,
                                             initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    reading = Reading(column=column, longest=longest, any_bytes=False)
    tokenizer.train_from_iterator(_texts(text, reading, max_bytes), trainer=trainer)
    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(output)
    except OSError as error:
        raise DataError(f"--output {output!r} cannot be written ({error.strerror})") from None
    size: int = tokenizer.get_vocab_size()
    return size


def _texts(patterns: Sequence[str], reading: Reading, max_bytes: int) -> Iterator[str]:
    """Documents, or parts of long ones. Of input larger than `max_bytes` each piece gives its share, from its beginning."""
    inputs = find_inputs(patterns)
    share = min(1.0, max_bytes / max(1, sum(each.size for each in inputs)))
    for piece in cut(inputs, PIECE_BYTES):
        left = PIECE_BYTES * share if share < 1 else float("inf")
        for record in read_piece(piece, reading):
            if isinstance(record, Record) and left > 0:
                left -= len(record.text)
                yield record.text.decode()
