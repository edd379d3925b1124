"""Two runs side by side: the same, or where they part."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_jobs import fake_job
from fake_trainer import FakeTrainer

from raytrain3d.cli import main
from raytrain3d.gang.run import run_job


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Directories of two equal runs."""
    for name in ("one", "two"):
        config = fake_job(tmp_path, name=name, mesh=(1, 1, 1), steps=4)
        assert run_job(config, launcher="inline", output=io.StringIO(), trainer=FakeTrainer) == 0
    return [str(tmp_path / "runs" / name) for name in ("one", "two")]


def test_equal_runs_are_called_so(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs]) == 0
    printed = capsys.readouterr().out
    assert "steps 1 to 4: loss, gradient norm, tokens and learning rate are the same to the bit" in printed
    assert "checkpoint of step 4: all " in printed


def test_the_first_step_that_differs_is_named(runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(runs[1]) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["loss"] += 1e-12
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["compare", *runs]) == 1
    assert "1 of 4 steps differ, the first is step 3 (loss 1.66" in capsys.readouterr().out


def test_a_box_that_differs_is_named(runs: list[str], monkeypatch: pytest.MonkeyPatch,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    from raytrain3d.gang import compare
    read = compare.read_manifest

    def changed(directory: str) -> object:
        manifest = read(directory)
        first, *rest = manifest.entries
        return replace(manifest, entries=(replace(first, checksum="00000000"), *rest)) if "two" in directory else manifest

    monkeypatch.setattr(compare, "read_manifest", changed)
    assert main(["compare", *runs]) == 1
    assert "checkpoint of step 4: 1 of " in capsys.readouterr().out


def test_what_is_no_run_is_refused(runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", runs[0], str(tmp_path)]) == 2
    assert "metrics.jsonl cannot be read" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["compare", runs[0], str(tmp_path)]) == 2
    assert "have no step in common" in capsys.readouterr().err
