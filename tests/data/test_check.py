"""Every way in which data can be wrong has a message that names the file or key and what would be right."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytrain3d.config import JobConfig
from raytrain3d.data import check
from raytrain3d.data.check import check_data, check_samples, verify_shards
from raytrain3d.data.manifest import DatasetManifest
from raytrain3d.data.prepare import prepare
from raytrain3d.data.tokenizer import fingerprint
from raytrain3d.data.tokens import checksum, write_shard
from raytrain3d.errors import DataError

Job = Callable[..., JobConfig]
Prepared = tuple[Path, DatasetManifest]


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    record = json.loads((path / "manifest.json").read_text())
    change(record)
    (path / "manifest.json").write_text(json.dumps(record))


def _refused(config: JobConfig, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        check_data(config)
    assert caught.value.__cause__ is None
    assert len(str(caught.value)) < 600


def test_good_data_passes(job: Job) -> None:
    check_data(job())
    check_data(job(vocabulary=50_000))
    verify_shards(job())


class TestDirectory:
    def test_missing(self, job: Job, tmp_path: Path) -> None:
        _refused(job(data={"path": str(tmp_path / "no")}),
                 r"data.path is '.*/no': no such directory; make it with `raytrain3d data prepare`")

    def test_empty(self, job: Job, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        _refused(job(data={"path": str(tmp_path / "empty")}), r"data.path is '.*/empty': the directory is empty; make")

    def test_foreign(self, job: Job, corpus: Path) -> None:
        (corpus / "a.txt").write_text("")
        _refused(job(data={"path": str(corpus)}),
                 r"not a dataset, it has no manifest.json \(but a.txt, part0, part1, \.\.\.\); make it with")

    def test_a_file(self, job: Job, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        _refused(job(data={"path": str(tmp_path / "file")}), r"data.path is '.*/file': a file, not a directory")


class TestManifest:
    @pytest.mark.parametrize("text", ["", "{", "\x00", "\udc80"])
    def test_unreadable(self, job: Job, dataset: Prepared, text: str) -> None:
        (dataset[0] / "manifest.json").write_text(text, errors="surrogateescape")
        _refused(job(), r"manifest.json cannot be read \(.*\): prepare the data again")

    @pytest.mark.parametrize("text", ["[]", "3", "{}", '{"version": 0}', '{"version": "1"}', '{"version": 1}'])
    def test_foreign(self, job: Job, dataset: Prepared, text: str) -> None:
        (dataset[0] / "manifest.json").write_text(text)
        _refused(job(), r"manifest.json is not a dataset manifest of format version 1")

    @pytest.mark.parametrize("change", [
        lambda record: record.update(vocabulary="257"), lambda record: record.update(train=3),
        lambda record: record.update(tokenizer=None), lambda record: record["train"][0].update(tokens=-1),
        lambda record: record["train"][0].pop("file"), lambda record: record.update(extra=1)])
    def test_wrong_fields(self, job: Job, dataset: Prepared, change: Callable[[dict[str, Any]], object]) -> None:
        _edit(dataset[0], change)
        _refused(job(), r"manifest.json is not a dataset manifest of format version 1")

    def test_newer_version(self, job: Job, dataset: Prepared) -> None:
        _edit(dataset[0], lambda record: record.update(version=2, new_field=1))
        _refused(job(), r"manifest.json has format version 2, this raytrain3d reads up to 1: update raytrain3d")


class TestFit:
    def test_vocabulary_larger_than_the_model(self, job: Job) -> None:
        _refused(job(vocabulary=256), r"its vocabulary has 257 token ids, but model.vocabulary is 256: set it to at "
                                      "least 257")

    @pytest.mark.parametrize("split", ["train", "validation"])
    def test_fewer_tokens_than_a_sample(self, job: Job, dataset: Prepared, split: str) -> None:
        tokens = {"train": dataset[1].tokens("train"), "validation": dataset[1].tokens("validation")}
        if split == "train":
            _edit(dataset[0], lambda record: record.update(train=record["train"][:1], validation=record["train"]))
            tokens["train"] = dataset[1].train[0].tokens
        check_samples(job(sequence=tokens[split] - 1))
        _refused(job(sequence=tokens[split]),
                 rf"its {split} split has {tokens[split]} tokens in \d+ documents, one sample needs "
                 rf"{tokens[split] + 1} \(train.sequence \+ 1\): prepare more text.*lower train.sequence")

    def test_no_validation_at_all(self, job: Job, corpus: Path, tmp_path: Path) -> None:
        prepare([f"{corpus}/**/*.txt"], str(tmp_path / "other"), "bytes", 0.0)
        _refused(job(data={"path": str(tmp_path / "other")}),
                 r"its validation split has 0 tokens in 0 documents.*raise data.validation_fraction")

    def test_another_tokenizer(self, job: Job, tmp_path: Path) -> None:
        (tmp_path / "other.json").write_text("{}")
        _refused(job(data={"tokenizer": str(tmp_path / "other.json")}),
                 r"data.tokenizer is '.*other.json', but data.path '.*data' was made with 'bytes': set data.tokenizer "
                 r"to 'bytes', or prepare")

    def test_bytes_for_data_of_a_tokenizer_file(self, job: Job, dataset: Prepared) -> None:
        _edit(dataset[0], lambda record: record["tokenizer"].update(name="llama.json", fingerprint="1234"))
        _refused(job(), r"data.tokenizer is 'bytes', but .* was made with 'llama.json': set data.tokenizer to "
                        r"'.*/data/tokenizer.json'")

    def test_tokenizer_file_that_is_gone(self, job: Job) -> None:
        _refused(job(data={"tokenizer": "gone.json"}), r"data.tokenizer is 'gone.json': no such file; .*to 'bytes'")

    def test_the_datasets_own_copy_of_the_tokenizer_fits(self, job: Job, dataset: Prepared) -> None:
        copy = dataset[0] / "tokenizer.json"
        copy.write_text("{}")
        _edit(dataset[0], lambda record: record["tokenizer"].update(fingerprint=fingerprint(str(copy))))
        check_data(job(data={"tokenizer": str(copy)}))


class TestShards:
    def test_every_flipped_bit_is_found(self, job: Job, dataset: Prepared) -> None:
        file = dataset[0] / dataset[1].validation[0].file
        good = file.read_bytes()
        for place in range(0, len(good), 97):
            file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1:])
            _refused(job(), r"validation-00000-000.arrow is corrupt: its checksum is .*, the manifest says .*: restore")

    @pytest.mark.parametrize("length", [0, 7, 100, -8, -1])
    def test_truncated(self, job: Job, dataset: Prepared, length: int) -> None:
        file = dataset[0] / dataset[1].train[1].file
        file.write_bytes(file.read_bytes()[:length])
        _refused(job(), r"train-00000-001.arrow is corrupt")

    def test_missing(self, job: Job, dataset: Prepared) -> None:
        (dataset[0] / dataset[1].train[1].file).unlink()
        _refused(job(), r"train-00000-001.arrow cannot be read \(No such file or directory\) though the manifest lists it")
        with pytest.raises(DataError, match="though the manifest lists it"):
            verify_shards(job())

    def test_a_directory_in_its_place(self, job: Job, dataset: Prepared) -> None:
        file = dataset[0] / dataset[1].train[1].file
        file.unlink()
        file.mkdir()
        _refused(job(), r"train-00000-001.arrow cannot be read \(Is a directory\)")

    def _replace(self, path: Path, content: np.ndarray[Any, Any], **claims: int) -> None:
        """Puts a well-formed shard with a true checksum in place of the first training shard."""
        shard = write_shard(path / "train-00000-000.arrow", content, [0, len(content)], 1)
        _edit(path, lambda record: record["train"][0].update(asdict(shard) | claims))

    def test_token_beyond_the_vocabulary(self, job: Job, dataset: Prepared) -> None:
        self._replace(dataset[0], np.array([1] * 499 + [257], dtype=np.uint16))
        _refused(job(vocabulary=1000), r"train-00000-000.arrow has token id 257, beyond the vocabulary of 257 \(valid are "
                                       r"0 to 256\)")

    def test_other_count_or_type_than_the_manifest(self, job: Job, dataset: Prepared) -> None:
        self._replace(dataset[0], np.ones(400, dtype=np.uint16), tokens=401)
        _refused(job(), r"train-00000-000.arrow holds 400 tokens of type uint16, the manifest says 401 of type uint16")
        self._replace(dataset[0], np.ones(400, dtype=np.uint32))
        _refused(job(), r"train-00000-000.arrow holds 400 tokens of type uint32, the manifest says 400 of type uint16")

    def test_a_file_that_is_not_arrow(self, job: Job, dataset: Prepared) -> None:
        (dataset[0] / "train-00000-000.arrow").write_text("not arrow " * 30)
        found = checksum(dataset[0] / "train-00000-000.arrow")
        _edit(dataset[0], lambda record: record["train"][0].update(checksum=found))
        _refused(job(), r"train-00000-000.arrow is not a whole Arrow token shard \(.*\): prepare the data again")

    def test_a_foreign_arrow_file(self, job: Job, dataset: Prepared) -> None:
        pa = pytest.importorskip("pyarrow")
        batch = pa.record_batch([pa.array([1, 2, 3])], names=["numbers"])
        with pa.OSFile(str(dataset[0] / "train-00000-000.arrow"), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as out:
            out.write_batch(batch)
        found = checksum(dataset[0] / "train-00000-000.arrow")
        _edit(dataset[0], lambda record: record["train"][0].update(checksum=found))
        _refused(job(), r"train-00000-000.arrow is not a whole Arrow token shard")

    def test_of_large_data_only_the_sizes_are_looked_at(
            self, job: Job, dataset: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
        file = dataset[0] / dataset[1].train[1].file
        file.write_bytes(file.read_bytes()[:-1])
        monkeypatch.setattr(check, "VERIFIED_BYTES", 10)
        check_data(job())
        with pytest.raises(DataError, match="is corrupt"):
            verify_shards(job())
        file.unlink()
        _refused(job(), "though the manifest lists it")

    def test_a_moved_dataset_is_whole(self, job: Job, dataset: Prepared, tmp_path: Path) -> None:
        shutil.move(dataset[0], tmp_path / "moved")
        check_data(job(data={"path": str(tmp_path / "moved")}))
