"""The commands that work on checkpoints, on a run that has just ended and on a model that was imported."""

import io
import re
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raytrain3d.checkpoint.convert_import import import_huggingface
from raytrain3d.checkpoint.store import record_loss, step_directory, steps
from raytrain3d.cli import main
from raytrain3d.data.prepare import prepare

JOB = str(Path(__file__).parent.parent / "jobs" / "tiny.yaml")
SMALL = ["train.sequence=32", "train.global_batch=4", "evaluate.samples=8", "model.hidden=16", "model.feed_forward=32",
         "learning_rate.warmup=0"]
VALIDATION = re.compile(r"validation loss +(\d+\.\d+)")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Directory of a run with checkpoints of steps 2 and 4, and what training printed."""
    place = tmp_path_factory.mktemp("trained")
    (place / "text").mkdir()
    for number in range(20):
        (place / "text" / f"{number}.txt").write_text(f"text number {number} " * 60)
    prepare([f"{place}/text/*.txt"], str(place / "data"), validation_fraction=0.2)
    with redirect_stdout(io.StringIO()) as printed:
        assert main(["train", JOB, "--launcher", "inline", f"run.directory={place}/runs", f"data.path={place}/data",
                     "train.steps=4", "checkpoint.interval=2", "checkpoint.keep=3", *SMALL]) == 0
    return place / "runs" / "tiny", printed.getvalue()


def output(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints, on stderr if it fails."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def rows(text: str) -> list[list[str]]:
    """Cells of the lines of a table, which are two spaces apart."""
    return [re.split(r" {2,}", line.strip()) for line in text.splitlines()]


def test_list_has_a_row_for_each_checkpoint(trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    run, printed = trained
    table = output(capsys, "checkpoint", "list", str(run))
    head, *found = rows(table)
    assert head == ["step", "holds", "parameters", "files", "size", "validation loss"]
    assert [row[0] for row in found] == ["2", "4"]
    holds = "weights (float32), first moments (float32), second moments (float32)"
    assert {row[1] for row in found} == {holds}
    assert [row[5:] for row in found] == [[], VALIDATION.findall(printed)[-1:]]
    assert output(capsys, "checkpoint", "list", "tiny", "--directory", str(run.parent)) == table
    assert "holds no checkpoints" in output(capsys, "checkpoint", "list", "other", "--directory", str(run.parent), code=1)


def test_list_shows_what_cannot_be_read(trained: tuple[Path, str], tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained[0], tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "step-4" / "manifest.json").write_text("{}")
    found = rows(output(capsys, "checkpoint", "list", str(tmp_path / "run")))
    assert found[2][0] == "4"
    assert found[2][1].startswith("unreadable: ")


def test_inspect_says_what_a_checkpoint_holds(trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = trained
    text = output(capsys, "checkpoint", "inspect", str(run))
    facts = dict(row for row in rows(text) if len(row) == 2)
    assert facts["checkpoint"] == f"{run}/checkpoints/step-4"
    assert facts["run"] == "tiny, step 4 of 4"
    assert facts["model"].startswith("llama, blocks 2, hidden 16, heads 4, kv_heads 2, feed_forward 32, vocabulary 257")
    assert "rank-0000.safetensors" in text
    text = output(capsys, "checkpoint", "inspect", f"{run}/checkpoints/step-2", "--parameters")
    assert "step 2 of 4" in text
    assert ["8 x 16", "blocks.1.attention.key.weight",
            "weights (float32), first moments (float32), second moments (float32)"] in rows(text)
    assert "is no checkpoint" in output(capsys, "checkpoint", "inspect", str(run.parent), code=1)


def test_verify_names_the_damaged_file(trained: tuple[Path, str], tmp_path: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained[0], tmp_path / "run")
    place = tmp_path / "run" / "checkpoints" / "step-4"
    assert output(capsys, "checkpoint", "verify", str(tmp_path / "run")) == f"{place} is whole\n"
    shard = place / "rank-0000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    assert f"error: {shard}" in output(capsys, "checkpoint", "verify", str(tmp_path / "run"), code=1)
    assert "is whole" in output(capsys, "checkpoint", "verify", f"{tmp_path}/run/checkpoints/step-2")


def test_prune_keeps_the_newest(trained: tuple[Path, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(trained[0], tmp_path / "run")
    for expected in ("deleted checkpoints of steps 2; checkpoints of steps 4 stay\n",
                     "deleted no checkpoints; checkpoints of steps 4 stay\n"):
        assert output(capsys, "checkpoint", "prune", str(tmp_path / "run"), "--keep", "1") == expected
    assert steps(str(tmp_path / "run")) == [4]
    with pytest.raises(SystemExit):
        main(["checkpoint", "prune", str(tmp_path / "run"), "--keep", "0"])


def test_prune_also_keeps_every_nth_and_the_best(trained: tuple[Path, str], tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint of step 2 has no validation loss until it is given one that is lower than that of step 4."""
    for number, (given, loss, stay) in enumerate([
            (("--keep-every", "2"), None, "2, 4"), (("--keep-every", "4"), None, "4"), (("--keep-every", "3"), None, "4"),
            (("--keep-best", "2"), None, "4"), (("--keep-best", "1"), 0.5, "2, 4")]):
        run = shutil.copytree(trained[0], tmp_path / str(number))
        if loss is not None:
            record_loss(step_directory(str(run), 2), loss)
        text = output(capsys, "checkpoint", "prune", str(run), "--keep", "1", *given)
        assert text.endswith(f"; checkpoints of steps {stay} stay\n"), given


def test_evaluate_finds_the_loss_of_the_run(trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    run, printed = trained
    trained_loss = VALIDATION.findall(printed)[-1]
    assert VALIDATION.findall(output(capsys, "evaluate", str(run))) == [trained_loss]
    before, = VALIDATION.findall(output(capsys, "evaluate", f"{run}/checkpoints/step-2"))
    assert float(before) > float(trained_loss)
    assert "(32 tokens of" in output(capsys, "evaluate", str(run), "evaluate.samples=1")
    assert "model.blocks is 3, but" in output(capsys, "evaluate", str(run), "model.blocks=3", code=2)
    assert "data.path is 'nowhere'" in output(capsys, "evaluate", str(run), "data.path=nowhere", code=2)


def test_generate_goes_on_from_the_prompt(trained: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(trained[0]), "--prompt", "text nu", "--tokens", "12"]
    assert output(capsys, *command).startswith("text nu")
    assert output(capsys, *command, "--seed", "5") == output(capsys, *command, "--seed", "5")
    assert output(capsys, *command, "--temperature", "0") == output(capsys, *command, "--temperature", "0", "--seed", "1")
    for wrong in (["--tokens", "0"], ["--temperature", "-1"]):
        with pytest.raises(SystemExit):
            main([*command, *wrong])


def test_trained_model_goes_to_hugging_face_and_back(trained: tuple[Path, str], tmp_path: Path,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    run, _ = trained
    out, back = str(tmp_path / "out"), str(tmp_path / "runs" / "back" / "checkpoints" / "step-0")
    assert output(capsys, "checkpoint", "export", str(run), "--output", out) \
        == f"wrote {out}: config.json, model.safetensors\n"
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(model, transformers.LlamaForCausalLM)
    prompt = torch.tensor([list(b"text nu")])
    expected = bytes(model.generate(prompt, max_new_tokens=8, do_sample=False, pad_token_id=0)[0].tolist())
    command = ["generate", str(run), "--prompt", "text nu", "--tokens", "8", "--temperature", "0"]
    assert output(capsys, *command) == expected.decode(errors="replace") + "\n"

    text = output(capsys, "checkpoint", "import", out, "--output", back)
    assert ["run", "back, step 0"] in rows(text)
    assert "weights (float32): 4 files" in text
    assert output(capsys, "checkpoint", "export", back, "--output", f"{out}-again")
    first, second = (load_file(f"{place}/model.safetensors") for place in (out, f"{out}-again"))
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    overrides = [f"data.path={run.parent.parent}/data", "train.sequence=32", "evaluate.samples=8", "train.micro_batch=4",
                 "train.global_batch=4"]
    assert VALIDATION.findall(output(capsys, "evaluate", back, *overrides)) == VALIDATION.findall(trained[1])[-1:]
    assert "train.sequence is missing" in output(capsys, "evaluate", back, "data.path=x", code=2)
    assert "already exists" in output(capsys, "checkpoint", "export", back, "--output", out, code=1)
    assert "config.json cannot be read" in output(capsys, "checkpoint", "import", str(run), "--output", back, code=1)


def test_incomplete_model_is_named_before_ranks_start(trained: tuple[Path, str], tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    output(capsys, "checkpoint", "export", str(trained[0]), "--output", str(tmp_path / "out"))
    file = tmp_path / "out" / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name != "lm_head.weight"}, file)
    text = output(capsys, "train", JOB, "--launcher", "inline", f"run.directory={tmp_path}/runs", *SMALL,
                  f"data.path={trained[0].parent.parent}/data", f"model.from_huggingface={tmp_path}/out", code=1)
    assert text == f"error: {tmp_path}/out: the tensor lm_head.weight is missing\n"
    assert not (tmp_path / "runs").exists()


def test_run_goes_on_from_an_imported_checkpoint(trained: tuple[Path, str], tmp_path: Path,
                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """One that lies where a run has its checkpoints."""
    run, _ = trained
    main(["checkpoint", "export", str(run), "--output", str(tmp_path / "out")])
    import_huggingface(str(tmp_path / "out"), f"{tmp_path}/runs/tiny/checkpoints/step-0", run="tiny")
    arguments: Sequence[str] = ["train", JOB, "--launcher", "inline", f"run.directory={tmp_path}/runs",
                                f"data.path={run.parent.parent}/data", "train.steps=1",
                                f"model.from_huggingface={tmp_path}/out", *SMALL]
    text = output(capsys, *arguments)
    assert f"resumed from {tmp_path}/runs/tiny/checkpoints/step-0" in text
    assert steps(f"{tmp_path}/runs/tiny") == [0, 1]
    output(capsys, "checkpoint", "prune", f"{tmp_path}/runs/tiny", "--keep", "1")
    assert not (tmp_path / "runs" / "tiny" / "checkpoints" / "step-0").exists()
