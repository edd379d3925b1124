"""Whatever is read from disk may be damaged or made up: it is refused with a clear error, or it is what its checksums say.

The normal run takes 200 mutants of all kinds of files, `pytest -m slow` takes 2,000.
"""

import ast
import hashlib
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fake_jobs import fake_job
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import raytrain3d
from raytrain3d.checkpoint.store import read_into, read_manifest
from raytrain3d.config import JobConfig
from raytrain3d.data.check import check_data, verify_shards
from raytrain3d.data.manifest import read_manifest as read_data_manifest
from raytrain3d.data.tokenizer import open_tokenizer
from raytrain3d.errors import RayTrain3DError
from raytrain3d.load import dump, load

LIMIT_S = 1.0
MEMORY_BYTES = 200 << 20
"""Most that the process may grow while it reads mutants of files of a few kilobytes."""
SHARES = {"config": 5, "manifest": 5, "sealed manifest": 3, "header": 4, "shard": 2, "data manifest": 2, "arrow": 2,
          "tokenizer": 2}
"""Of 25 mutants, how many of each kind."""
STRICT = ("manifest", "header")
"""At least 90 % of these must be refused."""


INSERTS = (b"9" * 400, b"{" * 4000, b"[" * 4000, b"1e999", b"-1", b"NaN", b"null", b"../", b"&a [*a, *a]",
           b"!!python/object/apply:os.system ['true']", b"${oc.env:HOME}")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A file, and what reads it."""

    path: Path
    read: Callable[[], object]
    """Raises when the file is refused; else what it holds, equal for equal contents."""
    mutate: Callable[[bytes, random.Random], bytes]
    exact: bool = True
    """What is not refused equals the original."""
    names_file: bool = True
    """In messages; of a job file they name keys."""


def scramble(data: bytes, draw: random.Random, end: int | None = None) -> bytes:
    """One to three small accidents within the first `end` bytes."""
    content = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(min(len(content), end or len(content)) or 1)
        match draw.randrange(7):
            case 0:
                content[at : at + 1] = bytes([(content[at] if at < len(content) else 0) ^ 1 << draw.randrange(8)])
            case 1:
                content[at : at + draw.randint(1, 40)] = b""
            case 2:
                content[at:at] = draw.randbytes(draw.randint(1, 8))
            case 3:
                content[at:at] = content[at : at + draw.randint(1, 60)]
            case 4:
                content[at : at + 8] = draw.choice((b"\xff" * 8, b"\0" * 8, (1 << 40).to_bytes(8, "little")))
            case 5:
                content[at:at] = draw.choice(INSERTS)
            case 6:
                del content[at:]
    return bytes(content)


def scramble_sealed(data: bytes, draw: random.Random) -> bytes:
    """A manifest with one value that is another one, and a right checksum."""
    body = json.loads(data)["manifest"]
    places = list(_places(body))
    holder, key = draw.choice(places)
    holder[key] = draw.choice((None, True, -1, 0, 10**30, 1.5, "", "../x", [], {}, [[]], "float64", [10**9, 10**9],
                               draw.choice(places)[0]))
    try:
        text = json.dumps(body)
    except ValueError:  # a value that holds itself
        return scramble_sealed(data, draw)
    seal = f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
    return json.dumps({"format": json.loads(data)["format"], "checksum": seal, "manifest": body}).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (holder, key) of a value inside `value`."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)


@pytest.fixture
def cases(tmp_path: Path, checkpoints: Any) -> dict[str, Case]:
    job = fake_job(tmp_path)
    data, config, saved = Path(job.data.path), tmp_path / "job.yaml", Path(checkpoints.save(str(tmp_path / "run"), 5))
    config.write_text(dump(job))
    rank = checkpoints.one_rank(checkpoints.config(), checkpoints.truth(checkpoints.config()))

    def read_checkpoint() -> object:
        for buffer in rank.buffers:
            buffer.fill_(-77.0)
        read_into(str(saved), rank.pieces)
        return [buffer.tolist() for buffer in rank.buffers]

    def read_data() -> None:
        check_data(job)
        verify_shards(job)

    header = int.from_bytes((saved / "rank-0000.safetensors").read_bytes()[:8], "little") + 8
    return {
        "config": Case(path=config, read=lambda: _valid(load(str(config))), mutate=scramble, exact=False,
                       names_file=False),
        "manifest": Case(path=saved / "manifest.json", read=lambda: read_manifest(str(saved)), mutate=scramble),
        "sealed manifest": Case(path=saved / "manifest.json", read=read_checkpoint, mutate=scramble_sealed, exact=False),
        "header": Case(path=saved / "rank-0000.safetensors", read=read_checkpoint,
                       mutate=lambda content, draw: scramble(content, draw, end=header)),
        "shard": Case(path=saved / "rank-0000.safetensors", read=read_checkpoint, mutate=scramble),
        "data manifest": Case(path=data / "manifest.json", read=lambda: read_data_manifest(data), mutate=scramble,
                              exact=False),
        "arrow": Case(path=next(data.glob("train-*.arrow")), read=read_data, mutate=scramble),
        "tokenizer": Case(path=_tokenizer(tmp_path), read=lambda: _used(tmp_path / "tokenizer.json"), mutate=scramble,
                          exact=False),
    }


def _valid(config: JobConfig) -> JobConfig:
    """It has been through every check when it was made; made again it is still the same."""
    assert replace(config) == config
    return config


def _tokenizer(directory: Path) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train_from_iterator(["some text, and some more text"] * 5,
                                  trainers.BpeTrainer(vocab_size=80, special_tokens=["</s>"], show_progress=False))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def _used(file: Path) -> list[int]:
    return open_tokenizer(str(file)).encode_text("some text", special=False)


class Watch:
    """An audit hook, which cannot be removed: it looks only inside `with`. No file may be written, no program started."""

    def __init__(self) -> None:
        self._is_looking = False
        sys.addaudithook(self._see)

    def __enter__(self) -> None:
        self._is_looking = True

    def __exit__(self, *_: object) -> None:
        self._is_looking = False

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_looking:
            writes = event == "open" and bool(set(str(arguments[1])) & set("wax+"))
            assert not writes and event not in ("os.system", "subprocess.Popen", "os.remove"), f"{event} {arguments}"


@pytest.fixture(scope="session")
def watch() -> Watch:
    return Watch()


@pytest.mark.parametrize("number", [200, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_mutants_are_refused_or_equal(number: int, cases: dict[str, Case], watch: Watch) -> None:
    kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
    originals = {kind: (case.path.read_bytes(), case.read()) for kind, case in cases.items()}
    tried, refused = Counter[str](), Counter[str]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(number):
        kind = kinds[index % len(kinds)]
        case, (good, original) = cases[kind], originals[kind]
        mutant = case.mutate(good, random.Random(index))
        case.path.write_bytes(mutant)
        with watch:
            is_refused = refuses(case, original, f"{kind} {index}")
        tried[kind] += mutant != good
        refused[kind] += is_refused
        case.path.write_bytes(good)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MEMORY_BYTES, f"{grown:,} bytes"
    for kind in STRICT:
        assert refused[kind] >= 0.9 * tried[kind], f"{kind}: {refused[kind]} of {tried[kind]} are refused"


def refuses(case: Case, original: object, which: str) -> bool:
    """Whether the file is refused in good time, with a message that names it. Any other error passes through."""
    start = time.process_time()
    try:
        found = case.read()
    except RayTrain3DError as error:
        place = str(case.path.parent if "sealed" in which else case.path)
        assert place in str(error) or not case.names_file, f"{which}: {error}"
        return True
    finally:
        assert time.process_time() - start < LIMIT_S, which
    assert not case.exact or found == original, f"{which} is taken for what it is not"
    return False


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "eval", "exec", "runpy",
             "unsafe_load", "full_load", "UnsafeLoader", "FullLoader", "allow_pickle", "trust_remote_code"}
LOADERS = {"torch", "np", "numpy", "yaml"}
"""Packages whose `load` can run code."""


def test_no_source_has_a_way_to_run_what_it_reads() -> None:
    for source in Path(raytrain3d.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            found = _names(node) & FORBIDDEN
            match node:
                case ast.Attribute(value=ast.Name(id=package), attr="load" | "load_all") if package in LOADERS:
                    found.add(f"{package}.load")
            assert not found, f"{source.name}:{getattr(node, 'lineno', 0)} uses {found}"


def _names(node: ast.AST) -> set[str]:
    match node:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            module = getattr(node, "module", None) or ""
            return {part for name in names for part in name.name.split(".")} | set(module.split("."))
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
            return {name}
    return set()
