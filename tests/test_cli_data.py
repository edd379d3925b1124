"""The commands that work on data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raytrain3d.cli import main
from raytrain3d.data.manifest import read_manifest

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "jobs" / "tiny.yaml")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Two files of JSON lines, a bad record in one."""
    for name in "ab":
        texts = [json.dumps({"text": f"the {name} number {number} and the end of it. " * 3}) for number in range(200)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*texts[:9], "{}" if name == "b" else "", *texts[9:]]))
    return tmp_path


def prepare(lines: Path, path: str, *more: str) -> list[str]:
    return ["data", "prepare", TINY, f"data.path={lines}/{path}", f"data.text=['{lines}/*.jsonl']", *more]


def test_tokenizer_data_set_inspect_and_verify(lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = f"{lines}/bpe.json"
    train = ["data", "train-tokenizer", TINY, f"data.text=['{lines}/*.jsonl']", "--output", tokenizer]
    assert main([*train, "--vocabulary", "300"]) == 0
    assert f"wrote {tokenizer}: 300 token ids" in capsys.readouterr().out
    assert main([*train, "--vocabulary", "300"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*train, "--vocabulary", "100"]) == 2
    assert "at least 257" in capsys.readouterr().err

    assert main(prepare(lines, "set", f"data.tokenizer={tokenizer}", "--workers", "1")) == 0
    out = capsys.readouterr().out
    assert f"1 bad records were left out (1 no column 'text'), see {lines}/set/bad_records.jsonl" in out
    manifest = read_manifest(lines / "set")
    assert manifest.documents("train") + manifest.documents("validation") == 400
    ratio = manifest.bytes_per_token("train")
    assert ratio is not None
    assert ratio > 1.5

    assert main(["data", "inspect", f"{lines}/set", "--samples", "2", "--shards"]) == 0
    out = capsys.readouterr().out
    assert f"{manifest.tokens('train'):,} tokens in {manifest.documents('train')} documents" in out
    assert "number 0 and the end of it. " in out
    assert manifest.train[0].checksum in out
    assert main(["data", "verify", f"{lines}/set"]) == 0
    assert "is whole" in capsys.readouterr().out

    shard = lines / "set" / manifest.train[0].file
    shard.write_bytes(shard.read_bytes()[:-1])
    assert main(["data", "verify", f"{lines}/set"]) == 1
    assert f"{shard} is corrupt" in capsys.readouterr().err


def test_a_set_without_a_path_or_a_data_set(lines: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", f"{lines}/nowhere"]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert main(prepare(lines, "set", "data.bad_records=fail")) == 2
    assert "b.jsonl row 10: no column 'text'; repair it" in capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_ray_tasks_give_the_same_bytes(lines: Path) -> None:
    """In a process of its own: a cluster of its own begins and ends with it."""
    assert main(prepare(lines, "calm", "--workers", "1")) == 0
    command = [sys.executable, "-m", "raytrain3d", *prepare(lines, "ray", "--ray")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(file.name for file in (lines / "calm").iterdir())
    assert names == sorted(file.name for file in (lines / "ray").iterdir())
    for name in names:
        assert (lines / "calm" / name).read_bytes() == (lines / "ray" / name).read_bytes()
