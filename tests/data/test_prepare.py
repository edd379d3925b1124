"""Text files to a dataset: which files, which split, what is stored, and what happens when it goes wrong."""

import json
import math
import os
import sys
import sysconfig
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from raytrain3d.config import DataConfig, JobConfig
from raytrain3d.data.documents import assign_splits, find_inputs
from raytrain3d.data.manifest import DatasetManifest, Split, read_manifest
from raytrain3d.data.prepare import PrepareProgress, prepare, prepare_if_missing
from raytrain3d.data.tokens import Dataset
from raytrain3d.errors import DataError


def _tokens(path: Path, split: Split) -> list[int]:
    return [token for shard in Dataset.open(str(path), split).shards() for token in shard.tolist()]


def _files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_manifest_is_read_back(dataset: tuple[Path, DatasetManifest]) -> None:
    path, manifest = dataset
    assert read_manifest(path) == manifest
    assert manifest.vocabulary == 257
    assert manifest.documents("train") + manifest.documents("validation") == 39
    assert manifest.bad == {"empty": 1}
    assert len(manifest.train) > 3
    assert {name.partition("-")[0] for name in _files(path)} == {"train", "validation", "manifest.json", "bad_records.jsonl"}
    assert not list(path.parent.glob(".*"))


def test_same_text_elsewhere_gives_the_same_bytes(
        corpus: Path, dataset: tuple[Path, DatasetManifest], tmp_path: Path) -> None:
    moved = tmp_path / "some" / "other" / "place"
    moved.parent.mkdir(parents=True)
    corpus.rename(moved)
    prepare([f"{moved}/**/*.txt"], str(tmp_path / "again"), "bytes", 0.2, shard_tokens=500)
    again, before = _files(tmp_path / "again"), _files(dataset[0])
    assert json.loads(again.pop("bad_records.jsonl"))["file"] == f"{moved}/part0/00.txt"
    del before["bad_records.jsonl"]
    assert again == before


def test_shard_size_does_not_change_the_stream(
        corpus: Path, dataset: tuple[Path, DatasetManifest], tmp_path: Path) -> None:
    for shard_tokens, at_least in ((1 << 22, 1), (97, 50)):
        path = tmp_path / str(shard_tokens)
        manifest = prepare([f"{corpus}/**/*.txt"], str(path), "bytes", 0.2, shard_tokens=shard_tokens)
        assert len(manifest.train) >= at_least
        assert _tokens(path, "train") == _tokens(dataset[0], "train")
        assert manifest.documents("train") == dataset[1].documents("train")
        assert manifest.bigram_entropy == dataset[1].bigram_entropy


def test_documents_keep_bytes_that_are_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\r\n no final newline")
    (tmp_path / "b.txt").write_bytes(b"")
    manifest = prepare([f"{tmp_path}/*.txt"], str(tmp_path / "data"), "bytes", 0.0)
    assert _tokens(tmp_path / "data", "train") == [*b"\xff\xfe\r\n no final newline", 256]
    assert (manifest.skipped, manifest.bad) == (1, {"empty": 1})
    assert manifest.validation == ()
    assert manifest.bigram_entropy is None


def test_progress_is_told_after_each_piece(corpus: Path, tmp_path: Path) -> None:
    told: list[PrepareProgress] = []
    manifest = prepare([f"{corpus}/*/*.txt"], str(tmp_path / "data"), piece_bytes=1000, progress=told.append)
    assert [progress.pieces for progress in told] == list(range(1, told[0].num_pieces + 1))
    assert len(told) > 5
    assert told[-1].tokens == manifest.tokens("train") + manifest.tokens("validation")
    assert told[-1].documents == 39


def test_bigram_entropy_against_a_plain_loop(dataset: tuple[Path, DatasetManifest]) -> None:
    path, manifest = dataset
    pairs = Counter(pairwise(_tokens(path, "train")))
    rows: Counter[int] = Counter()
    for (before, _), count in pairs.items():
        rows[before] += count
    losses = [-math.log((pairs[pair] + 1) / (rows[pair[0]] + 257)) for pair in pairwise(_tokens(path, "validation"))]
    assert manifest.bigram_entropy == pytest.approx(sum(losses) / len(losses), rel=1e-12)


def test_standard_library_is_found_and_has_known_entropy(tmp_path: Path) -> None:
    patterns = ("{stdlib}/*.py", "{stdlib}/*/*.py", "!{stdlib}/test/*", "!{stdlib}/site-packages/*")
    names = {each.name for each in find_inputs(patterns)}
    assert {"abc.py", "json/decoder.py"} <= names
    assert not [name for name in names if name.startswith(("test/", "site-packages/"))]
    manifest = prepare(patterns, str(tmp_path / "data"))
    assert manifest.tokens("train") > 5_000_000
    assert 0.02 < manifest.tokens("validation") / manifest.tokens("train") < 0.12
    assert manifest.bigram_entropy is not None
    assert 2.2 < manifest.bigram_entropy < 2.7


class TestPatterns:
    def test_names_are_sorted_and_below_the_fixed_part(self, corpus: Path) -> None:
        names = [each.name for each in find_inputs([f"{corpus}/part[01]/*.txt"])]
        assert names == sorted(names)
        assert {name.split("/")[0] for name in names} == {"part0", "part1"}

    def test_a_file_that_two_patterns_match_counts_once(self, corpus: Path) -> None:
        assert len(find_inputs([f"{corpus}/**/*.txt", f"{corpus}/part0/*.txt"])) == 40

    def test_exclamation_mark_takes_away(self, corpus: Path) -> None:
        left = find_inputs([f"{corpus}/*/*.txt", f"!{corpus}/part0/*", f"!{corpus}/nothing/*"])
        assert {each.name.split("/")[0] for each in left} == {"part1", "part2"}

    def test_a_single_file(self, corpus: Path) -> None:
        assert [each.name for each in find_inputs([f"{corpus}/part0/03.txt"])] == ["03.txt"]

    def test_relative_to_the_working_directory(self, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(corpus)
        assert find_inputs(["**/*.txt"])[0].name == "part0/00.txt"

    def test_library_directory_with_wildcards_in_its_name(
            self, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        strange = tmp_path / "lib[3]"
        corpus.rename(strange)
        monkeypatch.setattr(sysconfig, "get_path", lambda _: str(strange))
        assert find_inputs(["{stdlib}/part0/*.txt"])[0].location == str(strange / "part0" / "00.txt")
        assert find_inputs(["{stdlib}/*/*.txt"])[0].name == "part0/00.txt"

    def test_errors(self, corpus: Path) -> None:
        with pytest.raises(DataError, match=r"data.text has '.*\.md': no file matches"):
            find_inputs([f"{corpus}/**/*.txt", f"{corpus}/**/*.md"])
        with pytest.raises(DataError, match="at least one pattern"):
            find_inputs([])
        with pytest.raises(DataError, match="take away every file"):
            find_inputs([f"{corpus}/**/*.txt", f"!{corpus}/**"])


class TestSplits:
    def test_share_is_about_the_fraction(self) -> None:
        share = assign_splits([f"part/{number}.txt" for number in range(2000)], 0.1).count("validation") / 2000
        assert 0.08 < share < 0.12

    def test_a_document_keeps_its_split_when_others_come(self, corpus: Path) -> None:
        names = [each.name for each in find_inputs([f"{corpus}/**/*.txt"])]
        whole = dict(zip(names, assign_splits(names, 0.3), strict=True))
        assert assign_splits(names[::2], 0.3) == [whole[name] for name in names[::2]]

    def test_an_empty_file_stands_for_no_split(self, tmp_path: Path) -> None:
        for name, size in {"a": 0, "b": 5, "c": 5, "d": 0}.items():
            (tmp_path / f"{name}.txt").write_bytes(b"x" * size)
        manifest = prepare([f"{tmp_path}/*.txt"], str(tmp_path / "data"))
        assert (manifest.documents("train"), manifest.documents("validation")) == (1, 1)

    def test_both_splits_get_one(self, corpus: Path) -> None:
        names = [each.name for each in find_inputs([f"{corpus}/**/*.txt"])]
        assert assign_splits(names, 1e-9).count("validation") == 1
        assert assign_splits(names, 1 - 1e-9).count("train") == 1
        assert assign_splits(names, 0.0).count("validation") == 0
        assert assign_splits(names[:1], 0.05) == ["train"]


class TestFailures:
    def test_there_is_no_data_set_when_a_document_cannot_be_read(self, corpus: Path, tmp_path: Path) -> None:
        (corpus / "part0" / "30.txt.gz").write_bytes(b"not gzip")
        with pytest.raises(DataError, match=r"30\.txt\.gz cannot be read"):
            prepare([f"{corpus}/**/*.txt*"], str(tmp_path / "data"), shard_tokens=100)
        assert not (tmp_path / "data").exists()

    def test_existing_data_is_not_touched(self, corpus: Path, dataset: tuple[Path, DatasetManifest]) -> None:
        before = _files(dataset[0])
        with pytest.raises(DataError, match="already exists"):
            prepare([f"{corpus}/**/*.txt"], str(dataset[0]))
        assert _files(dataset[0]) == before

    def test_an_empty_directory_is_filled(self, corpus: Path, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        prepare([f"{corpus}/**/*.txt"], str(tmp_path / "data"))
        assert read_manifest(tmp_path / "data").documents("train") > 0

    def test_a_place_that_cannot_be_written(self, corpus: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match=r"data.path is '.*file/data': cannot be written \(Not a directory\)"):
            prepare([f"{corpus}/**/*.txt"], str(tmp_path / "file" / "data"))


class TestTokenizerFile:
    @pytest.fixture
    def tokenizer(self, tmp_path: Path) -> Path:
        """Words: 0 unknown, 1 end of text, 2 and 3 words."""
        tokenizers = pytest.importorskip("tokenizers")
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(
            {"[UNK]": 0, "<|endoftext|>": 1, "yes": 2, "no": 3}, unk_token="[UNK]"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        made.save(str(tmp_path / "words.json"))
        return tmp_path / "words.json"

    def test_tokens_and_skipped_documents(self, tokenizer: Path, tmp_path: Path) -> None:
        for name, text in {"a": b"yes no maybe", "b": b"\xff no", "c": b"", "d": b"no"}.items():
            (tmp_path / f"{name}.txt").write_bytes(text)
        manifest = prepare([f"{tmp_path}/?.txt"], str(tmp_path / "data"), str(tokenizer), 0.0)
        assert _tokens(tmp_path / "data", "train") == [2, 3, 0, 1, 3, 1]
        assert (manifest.vocabulary, manifest.skipped, manifest.documents("train")) == (4, 2, 2)
        assert (tmp_path / "data" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()

    def test_end_of_document_is_added_when_there_is_none(self, tokenizer: Path, tmp_path: Path) -> None:
        tokenizer.write_text(tokenizer.read_text().replace("<|endoftext|>", "perhaps"))
        (tmp_path / "a.txt").write_text("yes")
        manifest = prepare([f"{tmp_path}/a.txt"], str(tmp_path / "data"), str(tokenizer), 0.0)
        assert _tokens(tmp_path / "data", "train") == [2, 4]
        assert (manifest.vocabulary, manifest.tokenizer.end_of_document) == (5, 4)

    def test_errors(self, tokenizer: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        patterns, path = [f"{corpus}/**/*.txt"], str(tmp_path / "data")
        with pytest.raises(DataError, match=r"data.tokenizer is '.*nowhere.json': cannot be read"):
            prepare(patterns, path, str(tmp_path / "nowhere.json"))
        (tmp_path / "bad.json").write_text("{}")
        with pytest.raises(DataError, match=r"data.tokenizer is '.*bad.json': not a tokenizer.json"):
            prepare(patterns, path, str(tmp_path / "bad.json"))
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(DataError, match="needs the tokenizers package"):
            prepare(patterns, path, str(tokenizer))


def test_prepare_if_missing(corpus: Path, tmp_path: Path, job: object) -> None:
    assert callable(job)
    config: JobConfig = job()
    assert prepare_if_missing(config) is None
    fresh = DataConfig(path=str(tmp_path / "fresh"), text=(f"{corpus}/**/*.txt",), validation_fraction=0.2)
    assert prepare_if_missing(replace(config, data=fresh)) == read_manifest(fresh.path)
    stamp = os.stat(tmp_path / "fresh" / "manifest.json").st_mtime_ns
    assert prepare_if_missing(replace(config, data=fresh)) is None
    assert os.stat(tmp_path / "fresh" / "manifest.json").st_mtime_ns == stamp
    assert json.loads((tmp_path / "fresh" / "manifest.json").read_text())["version"] == 1
