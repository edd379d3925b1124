"""The command line: what each command calls and prints, exit codes, and that planning needs neither torch nor Ray."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from raytrain3d import config as config_module
from raytrain3d.cli import main, parse
from raytrain3d.config import JobConfig
from raytrain3d.errors import CapacityError, ConfigError, RankFailed
from raytrain3d.gang import mailbox
from raytrain3d.gang import run as gang_run
from raytrain3d.gang.mailbox import Status
from raytrain3d.load import load
from raytrain3d.plan.grid import parse_grid
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.plan.program import programs_for
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


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """A run directory with one recorded step of one rank."""
    plan = make_plan(load(QUICKSTART, ["mesh.data=1", "mesh.pipeline=1", "mesh.tensor=1"]))
    (tmp_path / "run" / "traces").mkdir(parents=True)
    (tmp_path / "run" / "plan.json").write_text(plan.to_json())
    spans = [[f"0{kind}{i}", 2 * i + j, 2 * i + j + 0.75] for i in range(plan.shares[0]) for j, kind in enumerate("FB")]
    line = {"step": 10, "rank": 0, "start": 5.0, "seconds": 2.0 * plan.shares[0], "spans": spans}
    (tmp_path / "run" / "traces" / "rank-0000.jsonl").write_text(json.dumps(line) + "\n")
    return tmp_path / "run"


def test_planning_needs_neither_torch_nor_ray(traced: Path) -> None:
    for command in (["plan", QUICKSTART], ["config"], ["version"], ["simulate", QUICKSTART], ["trace", str(traced)],
                    ["simulate", QUICKSTART, "--format", "perfetto"]):
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


CHUNKED = [QUICKSTART, "mesh.data=2", "mesh.pipeline=2", "pipeline.schedule=zb_v", "train.global_batch=5",
           "train.micro_batch=1"]


def test_simulate_prints_grid_idle_shares_and_critical_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *CHUNKED]) == 0
    out = capsys.readouterr().out
    plan = make_plan(load(CHUNKED[0], CHUNKED[1:]))
    programs = programs_for("zb_v", 2, 3, 2)
    lines = out.splitlines()
    grid = "\n".join(line for line in lines if line.startswith("rank ") and ":" in line)
    assert parse_grid(grid) == programs.schedule.ops
    assert "zb_v (2 chunks), 2 pipeline ranks, 3 micro-batches (replica 0, which has most)" in lines[0]
    assert "TFLOP/s a rank; messages are free" in lines[1]
    assert re.fullmatch(r"critical  \d+ ops from 0F0 to \dW2: rank 0 .*%, rank 1 .*%", lines[2])
    assert lines[-3].split("  ")[-5:] == ["stages", "idle of wall time", "idle of ideal time", "peak activations",
                                          "their memory"]
    for rank, line in enumerate(lines[-2:]):
        wall, ideal, peak = re.findall(r"([\d.]+)%|\b(\d+) +[\d.]+ MiB", line)
        assert float(ideal[0]) == pytest.approx(100 * float(wall[0]) / (100 - float(wall[0])), abs=0.5)
        assert int(peak[1]) == plan.estimates[rank].peak_in_flight


def test_simulate_as_json_and_trace_of_the_same_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", *CHUNKED, "--format", "json", "--tflops", "0.5", "--hop-ms", "0.25"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert [each["micro_batches"] for each in simulated["replicas"]] == [3, 2]
    first = simulated["replicas"][0]
    assert first["critical_path"][0][:2] == ["0F0", 0.0]
    assert first["critical_path"][-1][2] == first["step_s"] > 4 * 0.25e-3
    assert main(["simulate", *CHUNKED, "--format", "json"]) == 0
    faster = json.loads(capsys.readouterr().out)["replicas"][0]
    assert sum(length(faster)) == pytest.approx(sum(length(first)) / 2)

    output = tmp_path / "trace.json"
    assert main(["simulate", *CHUNKED, "--format", "perfetto", "--hop-ms", "0.25", "--tflops", "0.5", "--output",
                 str(output)]) == 0
    assert capsys.readouterr().out == f"wrote {output}\n"
    events = [event for event in json.loads(output.read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(2):
        own = [[event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6] for event in events
               if (event["pid"], event["tid"]) == (0, 2 * rank)]
        assert [name for name, *_ in own] == [name for name, *_ in first["ranks"][rank]["spans"]]
        assert [end for *_, end in own] == pytest.approx([end for *_, end in first["ranks"][rank]["spans"]], abs=1e-8)


def length(replica: dict[str, Any]) -> list[float]:
    """Seconds of every op of a replica in JSON."""
    return [end - start for rank in replica["ranks"] for _, start, end in rank["spans"]]


@pytest.mark.parametrize(("option", "value"), [("--tflops", "fast"), ("--hop-ms", "-1"), ("--tflops", "inf")])
def test_simulate_with_a_wrong_number(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", QUICKSTART, f"{option}={value}"])
    assert f"{option}: {value!r} is no number of at least 0" in capsys.readouterr().err


def test_simulate_at_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", QUICKSTART, "--tflops", "0"]) == 2
    assert capsys.readouterr().err == "error: --tflops is 0: must be above 0\n"


def test_trace_merges_and_compares(traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(traced)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^   0  replica 0, pipeline 0, tensor 0 +25.0% +0.0%$", out, re.MULTILINE), out
    assert out.endswith(f"wrote {traced}/trace.json\n")
    assert json.loads((traced / "trace.json").read_text())["traceEvents"]
    assert main(["trace", str(traced), "--output", str(tmp_path / "other.json")]) == 0
    assert (tmp_path / "other.json").read_text() == (traced / "trace.json").read_text()


def test_trace_of_a_run_without_traces(traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path / "nothing")]) == 2
    assert f"'{tmp_path}/nothing' is no run directory" in capsys.readouterr().err
    (traced / "traces" / "rank-0000.jsonl").unlink()
    assert main(["trace", str(traced)]) == 2
    assert "run.trace_interval must be set" in capsys.readouterr().err


def test_output_that_cannot_be_written(traced: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["trace", str(traced)], ["simulate", QUICKSTART]):
        assert main([*command, "--output", "/nowhere/at/all.json"]) == 2
        assert ("--output '/nowhere/at/all.json' cannot be written (No such file or directory): name a file in a directory "
                "that is there") in capsys.readouterr().err


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


def test_reference_of_commands_in_docs_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["commands"]) == 0
    printed = capsys.readouterr().out
    assert printed == (ROOT / "docs" / "cli.md").read_text()
    for words in ("## raytrain3d submit FILE [key=value ...]", "## raytrain3d checkpoint prune RUN", "**`--keep NUMBER`**",
                  "**`--package ship|image`**"):
        assert words in printed


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
