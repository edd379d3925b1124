"""What data cost: reading them for training, and preparing them.

| figure              | what                                                                                             |
|---------------------|--------------------------------------------------------------------------------------------------|
| `loader_vs_memmap`  | tokens/s of one rank's loader over a plain loop over a numpy memmap, sequence 4096               |
| `loader_tokens_per_s` | of that loader, one core                                                                       |
| `prepare_vs_encode` | tokens/s of a preparation by one process over `encode_batch_fast` alone, one thread each         |
| `prepare_scaling_2` | time of a preparation by one process over that by two                                            |
| `prepare_peak_gib`  | most memory of a preparation, over all its processes, of `prepare_input_gib` of JSON lines       |
| `start_s`           | from a manifest of `start_tokens` tokens to the first micro-batch, checks included               |

Contestants take turns within a round. Prints a table and one line of JSON.

    python benchmarks/data.py [--quick]
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch
from common import figure, ratios

from raytrain3d.config import DataConfig, JobConfig, ModelConfig, RunConfig, TrainConfig
from raytrain3d.data.check import check_data
from raytrain3d.data.documents import find_inputs
from raytrain3d.data.loader import Loader
from raytrain3d.data.manifest import DatasetManifest, TokenizerRecord, read_manifest, write_manifest
from raytrain3d.data.tokens import Dataset, write_shard
from raytrain3d.data.train_tokenizer import train_tokenizer
from raytrain3d.plan.plan import make_plan

SEQUENCE, MICRO_BATCH, GLOBAL_BATCH = 4096, 4, 64
VOCABULARY = 50_000
SHARD_TOKENS = 1 << 24
ROOT = Path(__file__).parent.parent
STDLIB = ("{stdlib}/**/*.py", "!{stdlib}/site-packages/**")


def write_dataset(path: Path, num_shards: int, shard_tokens: int) -> None:
    """Random tokens; every shard is the same file under another name."""
    path.mkdir()
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, VOCABULARY - 1, shard_tokens, dtype=np.uint16)
    ends = np.sort(draw.choice(np.arange(1, shard_tokens), shard_tokens // 1000, replace=False))
    tokens[ends - 1] = VOCABULARY - 1
    first = write_shard(path / "train-00000-000.arrow", tokens, [0, *ends.tolist(), shard_tokens], len(ends))
    records = [replace(first, file=f"train-{number:05d}-000.arrow") for number in range(num_shards)]
    for record in records[1:]:
        os.link(path / first.file, path / record.file)
    write_manifest(path, DatasetManifest(
        vocabulary=VOCABULARY, tokenizer=TokenizerRecord(name="bytes", fingerprint="bytes", end_of_document=VOCABULARY - 1),
        train=tuple(records), validation=(first,)))


def job(path: Path, steps: int) -> JobConfig:
    return JobConfig(run=RunConfig(name="data"), data=DataConfig(path=str(path)),
                     model=ModelConfig(vocabulary=VOCABULARY, hidden=8, blocks=1, heads=1, feed_forward=8),
                     train=TrainConfig(steps=steps, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, sequence=SEQUENCE))


def loader_rates(directory: Path, rounds: int, steps: int) -> tuple[list[float], list[float]]:
    """Tokens/s of the loader and of the plain loop, round by round; both read the same amount in random order."""
    write_dataset(directory / "loader", 4, SHARD_TOKENS)
    config = job(directory / "loader", steps)
    with (directory / "plain.bin").open("wb") as file:
        for shard in Dataset.open(str(directory / "loader"), "train").shards():
            shard.tofile(file)
    flat = np.memmap(directory / "plain.bin", dtype=np.uint16, mode="r")
    ours, theirs = [], []
    for _ in range(rounds + 1):
        loader = Loader(config, make_plan(config), 0)
        ours.append(_rate(lambda step, loader=loader: loader.micro_batches(step), steps))
        loader.close()
        theirs.append(_rate(lambda step: _memmap_step(flat), steps))
    return ours[1:], theirs[1:]


def _rate(step: Callable[[int], object], steps: int) -> float:
    start = time.process_time()
    for number in range(1, steps + 1):
        step(number)
    return steps * GLOBAL_BATCH * SEQUENCE / (time.process_time() - start)


def _memmap_step(flat: np.ndarray) -> list[tuple[torch.Tensor, torch.Tensor]]:  # type: ignore[type-arg]
    """As plain training scripts do it."""
    found = []
    for _ in range(GLOBAL_BATCH // MICRO_BATCH):
        places = torch.randint(len(flat) - SEQUENCE - 1, (MICRO_BATCH,)).tolist()
        x = torch.stack([torch.from_numpy(flat[i:i + SEQUENCE].astype(np.int64)) for i in places])
        y = torch.stack([torch.from_numpy(flat[i + 1:i + 1 + SEQUENCE].astype(np.int64)) for i in places])
        found.append((x, y))
    return found


def write_lines(directory: Path, num_bytes: int, files: int) -> None:
    """The standard library's sources as JSON lines, again and again."""
    texts = [Path(each.location).read_bytes().decode(errors="ignore") for each in find_inputs(STDLIB)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts if text]
    directory.mkdir()
    for number in range(files):
        written, place = 0, number * len(lines) // files
        with (directory / f"{number}.jsonl").open("w") as file:
            while written < num_bytes // files:
                written += file.write(lines[place % len(lines)])
                place += 1


def encode_alone(tokenizer: str, directory: Path) -> float:
    """Tokens/s of `encode_batch_fast` in one thread, the text being in memory."""
    import tokenizers

    made = tokenizers.Tokenizer.from_file(tokenizer)
    texts = [json.loads(line)["text"] for file in sorted(directory.iterdir()) for line in file.open()]
    batches, batch, size = [], [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size > 1 << 20:
            batches.append(batch)
            batch, size = [], 0
    batches.append(batch)
    start, tokens = time.perf_counter(), 0
    for batch in batches:
        tokens += sum(len(each) for each in made.encode_batch_fast(batch, add_special_tokens=False))
    return tokens / (time.perf_counter() - start)


def preparation(directory: Path, output: str, workers: int, *overrides: str) -> list[str]:
    """The command, as a user gives it."""
    return [sys.executable, "-m", "raytrain3d", "data", "prepare", str(ROOT / "jobs" / "tiny.yaml"),
            f"data.text=['{directory}/*.jsonl']", f"data.path={output}", "--workers", str(workers), *overrides]


def prepare_seconds(tokenizer: str, directory: Path, workers: int) -> tuple[float, int]:
    """(seconds, tokens) of the whole command."""
    with tempfile.TemporaryDirectory(dir=directory.parent) as place:
        start = time.perf_counter()
        subprocess.run(preparation(directory, f"{place}/out", workers, f"data.tokenizer={tokenizer}"), check=True,
                       stdout=subprocess.DEVNULL)
        seconds, manifest = time.perf_counter() - start, read_manifest(f"{place}/out")
    return seconds, manifest.tokens("train") + manifest.tokens("validation")


def peak_memory(directory: Path) -> float:
    """GiB of all processes of a preparation together, seen ten times a second; pages that they share count for each."""
    command = preparation(directory, f"{directory}-out", 2, "data.drop_duplicates=true")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        own, most = psutil.Process(process.pid), 0
        while process.poll() is None:
            with suppress(psutil.Error):  # one has ended just now
                most = max(most, sum(each.memory_info().rss for each in (own, *own.children(recursive=True))))
            time.sleep(0.1)
    if process.returncode:
        raise RuntimeError("the preparation failed")
    return most / 2**30


def start_seconds(directory: Path, num_shards: int) -> float:
    write_dataset(directory / "large", num_shards, SHARD_TOKENS)
    config = job(directory / "large", 10)
    start = time.perf_counter()
    check_data(config)
    loader = Loader(config, make_plan(config), 0)
    loader.micro_batches(1)
    seconds = time.perf_counter() - start
    loader.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, whose figures mean little")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rounds, text_bytes, large = (2, 4 << 20, 1 << 25) if quick else (5, 48 << 20, 2 << 30)
    shards = 100 if quick else -(-100_000_000_000 // SHARD_TOKENS)
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        ours, theirs = loader_rates(directory, rounds, 2 if quick else 40)
        found |= figure("loader_vs_memmap", ratios(ours, theirs)) | figure("loader_tokens_per_s", ours)
        found |= {"start_s": round(start_seconds(directory, shards), 3), "start_tokens": shards * SHARD_TOKENS}
        tokenizer = str(directory / "bpe.json")
        train_tokenizer(["{stdlib}/*.py"], tokenizer, vocabulary=8192)
        write_lines(directory / "text", text_bytes, 4)
        encode, one, scaling = [], [], []
        for _ in range(rounds):
            encode.append(encode_alone(tokenizer, directory / "text"))
            seconds, tokens = prepare_seconds(tokenizer, directory / "text", 1)
            one.append(tokens / seconds)
            scaling.append(seconds / prepare_seconds(tokenizer, directory / "text", 2)[0])
        found |= figure("prepare_vs_encode", ratios(one, encode)) | figure("prepare_scaling_2", scaling)
        found |= figure("prepare_tokens_per_s", one)
        write_lines(directory / "many", large, 3)
        found |= {"prepare_peak_gib": round(peak_memory(directory / "many"), 3), "prepare_input_gib": large / 2**30}
    for key, value in found.items():
        print(f"{key:32} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
