"""Bad input ends `raytrain3d train` before any rank starts, with a message of key or file, value, and what is valid.

What only a cluster or a run directory can show (too small, unwritable, another run's, a name in use) is in tests/gang.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from raytrain3d.cli import main
from raytrain3d.data.prepare import prepare
from raytrain3d.data.tokens import checksum
from raytrain3d.gang import run as gang_run

Refusal = Callable[..., str]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A dataset of 6 documents, 1,000 bytes each."""
    (tmp_path / "text").mkdir()
    for number in range(6):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} " * 80)
    prepare([f"{tmp_path}/text/*.txt"], str(tmp_path / "data"), "bytes", 0.3)
    return tmp_path / "data"


@pytest.fixture
def refusal(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
            capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs `train` on a good job with overrides that make it bad; gives the message."""
    job = tmp_path / "job.yaml"
    job.write_text(f"""
run: {{name: bad, directory: {tmp_path}/runs}}
model: {{vocabulary: 257, hidden: 64, blocks: 2, heads: 4, feed_forward: 96}}
train: {{steps: 2, global_batch: 8, micro_batch: 2, sequence: 32}}
data: {{path: {data}}}
""")

    def no_rank_may_start(*_: object) -> None:
        raise AssertionError("the launcher was opened")

    monkeypatch.setattr(gang_run, "open_launcher", no_rank_may_start)
    monkeypatch.chdir(tmp_path)

    def run(*overrides: str) -> str:
        assert main(["train", str(job), *overrides]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ")
        assert "Traceback" not in message
        assert not (tmp_path / "runs").exists()
        return message
    return run


def test_the_job_without_overrides_is_good(refusal: Refusal) -> None:
    with pytest.raises(AssertionError, match="the launcher was opened"):
        refusal()


@pytest.mark.parametrize(("overrides", "parts"), [
    pytest.param(["train.sequnce=64"], ["'train.sequnce'", "'train.sequence'"], id="misspelt key"),
    pytest.param(["train.steps=many"], ["train.steps", "'many'", "whole number"], id="wrong type"),
    pytest.param(["mesh.tensor=3", "model.feed_forward=99"], ["mesh.tensor", "3", "model.heads (4)"],
                 id="tensor does not divide heads"),
    pytest.param(["mesh.tensor=4", "model.feed_forward=98"], ["mesh.tensor", "4", "model.feed_forward (98)"],
                 id="tensor does not divide feed-forward"),
    pytest.param(["mesh.tensor=4", "model.heads=12", "model.kv_heads=6", "model.hidden=96"],
                 ["mesh.tensor", "4", "model.kv_heads (6)"], id="tensor does not fit key/value heads"),
    pytest.param(["mesh.data=4", "train.sharding=full", "train.shard_group=3"],
                 ["train.shard_group", "3", "must divide mesh.data (4)"], id="shard groups do not fit"),
    pytest.param(["mesh.pipeline=5"], ["mesh.pipeline", "5", "4 layers", "embedding, 2 blocks, head", "at most 4"],
                 id="more stages than layers"),
    pytest.param(["mesh.pipeline=2", "pipeline.schedule=interleaved", "pipeline.chunks=3"],
                 ["pipeline.chunks", "3", "interleaved", "mesh.pipeline 2", "6 stages", "4 layers", "at most 2 chunks",
                  "mesh.pipeline at most 1"], id="more chunks than layers"),
    pytest.param(["mesh.pipeline=4", "pipeline.schedule=zb_v"],
                 ["pipeline.chunks", "2", "zb_v", "mesh.pipeline 4", "8 stages", "4 layers", "mesh.pipeline at most 2"],
                 id="more stages of zb_v than layers"),
    pytest.param(["pipeline.chunks=2"], ["pipeline.chunks", "2", "must be 1", "1f1b", "'interleaved'"],
                 id="chunks of a schedule that has none"),
    pytest.param(["pipeline.chunks=1", "pipeline.schedule=zb_v"], ["pipeline.chunks", "1", "must be 2", "zb_v"],
                 id="one chunk of zb_v"),
    pytest.param(["pipeline.chunks=0", "pipeline.schedule=auto"], ["pipeline.chunks", "0", "above 0"], id="no chunks"),
    pytest.param(["pipeline.schedule=dualpipe"], ["pipeline.schedule", "'dualpipe'", "auto, gpipe", "zb_v"],
                 id="unknown schedule"),
    pytest.param(["pipeline.layers=[2,2]", "mesh.pipeline=2", "pipeline.schedule=zb_v"],
                 ["pipeline.layers", "[2, 2]", "one count per stage", "4 stages", "pipeline.chunks is 2"],
                 id="layers of ranks instead of stages"),
    pytest.param(["pipeline.layers=[1,1,2]", "mesh.pipeline=2", "pipeline.schedule=auto"],
                 ["pipeline.layers", "[1, 1, 2]", "a multiple of 2 stages"], id="layers of no number of chunks"),
    pytest.param(["pipeline.layers=[2,3]", "mesh.pipeline=2"], ["pipeline.layers", "[2, 3]", "adds up to 5", "4 layers"],
                 id="more layers than the model has"),
    pytest.param(["pipeline.recompute=[full]", "mesh.pipeline=2"],
                 ["pipeline.recompute", "['full']", "one kind per stage", "2 stages"], id="recompute of too few stages"),
    pytest.param(["pipeline.recompute=[full,some]", "mesh.pipeline=2"],
                 ["pipeline.recompute[1]", "'some'", "none, selective, full"], id="unknown recompute of a stage"),
    pytest.param(["pipeline.recompute=[full,none,full,none]", "pipeline.layers=[2,2]", "mesh.pipeline=2",
                  "pipeline.schedule=auto"], ["pipeline.recompute", "one kind per stage", "pipeline.layers has 2 stages"],
                 id="recompute and layers of different stages"),
    pytest.param(["train.recompute_every=0"], ["train.recompute_every", "0", "above 0"], id="recompute of no block"),
    pytest.param(["train.sequence_parallel=true", "mesh.tensor=4", "train.sequence=66"],
                 ["train.sequence", "66", "multiple of mesh.tensor (4)"], id="sequence that tensor ranks cannot divide"),
    pytest.param(["run.trace_interval=0"], ["run.trace_interval", "0", "above 0"], id="no interval of traces"),
    pytest.param(["placement.memory_per_rank_gib=0.0001"],
                 ["placement.memory_per_rank_gib", "0.0001", "1f1b", "pipeline rank 0", "too much", "pipeline.schedule auto",
                  "train.recompute full"], id="memory that no rank can keep to"),
    pytest.param(["train.global_batch=9"], ["train.global_batch", "9", "multiple of train.micro_batch (2)"],
                 id="global batch not divisible by micro-batch"),
    pytest.param(["data.path=nowhere"], ["data.path", "nowhere", "no such directory", "raytrain3d data prepare"],
                 id="missing data directory"),
    pytest.param(["data.path=text"], ["data.path", "text", "no manifest.json", "0.txt", "raytrain3d data prepare"],
                 id="foreign data directory"),
    pytest.param(["model.vocabulary=200"], ["vocabulary", "257", "model.vocabulary is 200", "at least 257"],
                 id="data tokenized with another vocabulary"),
    pytest.param(["data.tokenizer=other.json"], ["data.tokenizer", "other.json", "'bytes'"], id="another tokenizer"),
    pytest.param(["train.sequence=9000"], ["tokens", "9001", "train.sequence"], id="fewer tokens than a sample"),
    pytest.param(["data.path=null"], ["data.path", "None", "data.sources instead"], id="no data"),
    pytest.param(["data.sources=[{name: a, path: x}]"], ["data.path", "data.sources instead"], id="a path and sources"),
    pytest.param(["data.path=null", "data.sources=[{name: a, path: x, weight: 1}, {name: b, path: y}]"],
                 ["data.sources.weight", "['a']", "all sources or for none"], id="weights of some sources"),
    pytest.param(["data.path=null", "data.sources=[{name: a, path: x}, {name: a, path: y}]"],
                 ["data.sources.name", "'a'", "given twice"], id="two sources of a name"),
    pytest.param(["data.path=null", "data.sources=[{name: a, path: x}]", "data.phases=[{tokens: 9, weights: {b: 1}}]"],
                 ["data.phases.weights", "'b'", "valid are the sources a"], id="phase with a foreign source"),
    pytest.param(["data.path=null", "data.sources=[{name: a, path: nowhere}]"],
                 ["data.sources[0].path", "nowhere", "no such directory"], id="source that is missing"),
    pytest.param(["evaluate.sets=[{name: a, path: nowhere}]"], ["evaluate.sets[0].path", "nowhere", "no such directory"],
                 id="validation set that is missing"),
    pytest.param(["data.path=new", "data.text=[nothing/*.txt]"], ["data.text", "nothing/*.txt", "no file matches"],
                 id="text that is not there"),
])
def test_bad_key(refusal: Refusal, overrides: list[str], parts: list[str]) -> None:
    message = refusal(*overrides)
    assert all(part in message for part in parts), message


def test_empty_data_directory(refusal: Refusal, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = refusal("data.path=empty")
    assert re.search(r"data\.path is '.*empty'.*the directory is empty.*raytrain3d data prepare", message), message


def test_corrupt_shard(refusal: Refusal, data: Path) -> None:
    shard = data / "train-00000-000.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    message = refusal()
    assert re.search(r"train-00000-000\.arrow is corrupt.*checksum is \w+.*manifest says \w+.*prepare", message), message


def test_token_beyond_the_vocabulary(refusal: Refusal, data: Path) -> None:
    """A shard that holds the id 300 and whose checksum is right, in a dataset that claims 257 ids."""
    shard, record = data / "train-00000-000.arrow", json.loads((data / "manifest.json").read_text())
    content = shard.read_bytes()
    place = content.index("document".encode("utf-16-le"))
    shard.write_bytes(content[:place] + (300).to_bytes(2, "little") + content[place + 2:])
    record["train"][0]["checksum"] = checksum(shard)
    (data / "manifest.json").write_text(json.dumps(record))
    message = refusal()
    assert "train-00000-000.arrow has token id 300, beyond the vocabulary of 257 (valid are 0 to 256)" in message


def test_job_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "no-such-job.yaml"]) == 2
    assert "'no-such-job.yaml'" in capsys.readouterr().err
