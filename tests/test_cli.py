"""The command line: what each command calls and prints, exit codes, and that planning needs neither torch nor Ray."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from raytrain3d import config as config_module
from raytrain3d.cli import main, parse
from raytrain3d.config import JobConfig
from raytrain3d.errors import CapacityError, ConfigError, RankFailed
from raytrain3d.gang import mailbox
from raytrain3d.gang import run as gang_run
from raytrain3d.gang.mailbox import Status
from raytrain3d.load import load
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.reference import read_sections, reference

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "jobs" / "quickstart.yaml")
WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'ray', 'pyarrow', 'numpy', 'rich', 'safetensors'):
            raise ImportError(f'{name} is not installed')
sys.meta_path.insert(0, Refuse())
from raytrain3d.cli import main
sys.exit(main(sys.argv[1:]))
"""


class Calls:
    """Stands in for gang.run: remembers jobs, and ends as told."""

    def __init__(self) -> None:
        self.jobs: list[tuple[JobConfig, str, str | None]] = []
        self.ending: int | BaseException = 0

    def __call__(self, job: JobConfig, *, launcher: str, address: str | None = None) -> int:
        self.jobs.append((job, launcher, address))
        if isinstance(self.ending, BaseException):
            raise self.ending
        return self.ending


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(gang_run, "run_job", calls)
    monkeypatch.setattr(gang_run, "check_job", calls)
    return calls


def test_plan_needs_neither_torch_nor_ray() -> None:
    for command in (["plan", QUICKSTART], ["config"], ["version"]):
        done = subprocess.run([sys.executable, "-c", WITHOUT, *command], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_module_and_command_are_the_same() -> None:
    done = subprocess.run([sys.executable, "-m", "raytrain3d", "plan", QUICKSTART, "train.stesp=1"],
                          capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "error: unknown key 'train.stesp': did you mean 'train.steps'?\n"


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m raytrain3d config | true"
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT).stderr == ""


def test_plan_prints_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(load(QUICKSTART, ["mesh.tensor=1"]))
    assert main(["plan", QUICKSTART, "mesh.tensor=1"]) == 0
    assert capsys.readouterr().out == plan.table() + "\n"
    assert main(["plan", "--json", QUICKSTART, "mesh.tensor=1"]) == 0
    printed = capsys.readouterr().out
    assert Plan.from_json(printed) == plan
    assert json.loads(printed)["mesh"] == {"data": 2, "pipeline": 2, "tensor": 1}


def test_plan_is_made_for_the_device_of_the_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", QUICKSTART, "placement.device=gpu"]) == 0
    assert "on gpu" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [
    ["train", "FILE", "a.b=1", "c=2", "--launcher", "local"],
    ["train", "FILE", "--launcher", "local", "a.b=1", "c=2"],
    ["train", "--launcher=local", "FILE", "a.b=1", "c=2"],
    ["train", "--launcher", "local", "FILE", "a.b=1", "--address", "x", "c=2"],
])
def test_overrides_may_stand_anywhere_after_the_file(arguments: Sequence[str]) -> None:
    parsed = parse(arguments)
    assert (parsed.file, parsed.overrides, parsed.launcher) == ("FILE", ["a.b=1", "c=2"], "local")


@pytest.mark.parametrize("arguments", [[], ["trane", "x"], ["train"], ["train", "x", "--launchr", "ray"],
                                       ["train", "x", "--launcher", "slurm"], ["stop"], ["stop", "a", "b"], ["data"],
                                       ["config", "x"], ["plan", "x", "--steps=3"]])
def test_wrong_usage_ends_with_2_and_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: raytrain3d" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "check"])
def test_job_is_handed_on_with_launcher_and_address(command: str, calls: Calls) -> None:
    text = "data.text=[]"
    calls.ending = 143
    assert main([command, QUICKSTART, "train.steps=50", text, "--launcher", "local", "--address", "auto"]) == 143
    assert main([command, QUICKSTART, text]) == 143
    assert calls.jobs == [(load(QUICKSTART, ["train.steps=50", text]), "local", "auto"),
                          (load(QUICKSTART, [text]), "ray", None)]


def test_train_prepares_missing_data_once(calls: Calls, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("some text " * 50)
    arguments = ["train", QUICKSTART, f"data.path={tmp_path}/data", f"data.text=['{tmp_path}/*.txt']"]
    assert main(arguments) == 0
    assert f"prepared {tmp_path}/data: train " in capsys.readouterr().out
    assert (tmp_path / "data" / "manifest.json").is_file()
    assert main(arguments) == 0
    assert capsys.readouterr().out == ""
    assert len(calls.jobs) == 2


def test_data_prepare_makes_the_data_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("x" * 99)
    arguments = ["data", "prepare", QUICKSTART, f"data.path={tmp_path}/data", f"data.text=['{tmp_path}/*.txt']",
                 "data.validation_fraction=0.25"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "300 tokens in 3 documents" in out
    assert "100 tokens in 1 documents" in out
    assert main(arguments) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "code"), [
    (RankFailed("rank 3 (replica 0, stage 1, tensor 1) died", rank=3), 1),
    (CapacityError("asked for 8 CPUs"), 1), (ConfigError("run.name is 'x'"), 2), (KeyboardInterrupt(), 130)])
def test_error_becomes_a_message_and_an_exit_code(error: BaseException, code: int, calls: Calls,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    calls.ending = error
    assert main(["train", QUICKSTART, "data.text=[]"]) == code
    assert capsys.readouterr().err == (f"error: {error}\n" if str(error) else "")


def test_debug_shows_the_traceback(calls: Calls) -> None:
    calls.ending = ConfigError("run.name is 'x'")
    with pytest.raises(ConfigError, match=r"run\.name is 'x'"):
        main(["train", QUICKSTART, "data.text=[]", "--debug"])


def test_status_and_stop_ask_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, str, str, str | None]] = []

    def ask_run(run: str, command: str, *, directory: str, address: str | None) -> Status:
        asked.append((run, command, directory, address))
        return Status(run=run, state="running", step=7, num_steps=9, loss=2.5, tokens_per_s=1234.5)

    monkeypatch.setattr(mailbox, "ask_run", ask_run)
    assert main(["status", "one", "--directory", "/runs"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ("one", "running", "7 of 9", "2.5000", "1,234")), out
    assert main(["stop", "one", "--address", "auto"]) == 0
    assert "asked one to stop" in capsys.readouterr().out
    assert asked == [("one", "status", "/runs", None), ("one", "stop", "runs", "auto")]


def test_status_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(tmp_path / "one")]) == 2
    assert f"no run '{tmp_path}/one' is under way" in capsys.readouterr().err


def test_reference_in_docs_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    printed = capsys.readouterr().out
    assert (ROOT / "docs" / "config.md").read_text() == printed, "run: raytrain3d config > docs/config.md"


def test_every_key_is_in_the_reference_with_its_meaning() -> None:
    sections = read_sections(Path(config_module.__file__).read_text())
    undocumented = [f"{name}.{key.name}" for name, section in sections.items() for key in section.keys if not key.text]
    assert not undocumented
    text = reference()
    for entry in ("**`model.heads`** (int; required): Number of attention",
                  "**`train.dtype`** (fp32 | bf16 | fp64; default fp32)",
                  "**`pipeline.layers`** (list of int | null; default null)",
                  "**`network.environment`** (mapping of str to str; default {})",
                  "**`model.rotary_scaling.factor`** (float; default 8.0)"):
        assert entry in " ".join(text.split()), entry
