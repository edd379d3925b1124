"""Every command in README.md and the guides works as written: quickly with what it starts left out, in full when slow
tests are on."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from raytrain3d.cli import main
from raytrain3d.config import JobConfig
from raytrain3d.data.prepare import prepare
from raytrain3d.data.train_tokenizer import train_tokenizer
from raytrain3d.gang import jobs, mailbox
from raytrain3d.gang import run as gang_run
from raytrain3d.gang.follow import JobState
from raytrain3d.gang.mailbox import Status
from raytrain3d.gang.run import run_job
from raytrain3d.load import load
from raytrain3d.plan.plan import make_plan

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LIVE = ("status", "rebalance", "stop", "submit", "logs")
GUIDES = ("README.md", "docs/tutorial.md", "docs/how-to.md")
SMALL = ["train.steps=2", "learning_rate.warmup=1", "evaluate.samples=4"]


def commands(page: str) -> list[str]:
    """Lines of the command blocks of a page."""
    text = (ROOT / page).read_text()
    return [line for block in BLOCK.findall(text) for line in block.splitlines()]


COMMANDS = list(dict.fromkeys(line for page in GUIDES for line in commands(page) if line.startswith("raytrain3d ")))


class FakeJob:
    """A submitted job that has ended."""

    id, grace_s = "quickstart-1", 300.0

    def state(self) -> JobState:
        return JobState(status="SUCCEEDED", exit_code=0)

    stop = state

    async def output(self) -> AsyncIterator[str]:
        yield "finished\n"

    def printed(self) -> str:
        return "finished\n"


class FakeJobs:
    """A cluster's job server."""

    def __init__(self, address: str | None) -> None:
        self.url = address

    def submit(self, config: JobConfig, how: jobs.Submission) -> FakeJob:
        jobs.check_paths(config)
        return FakeJob()

    def job_of(self, run: str) -> FakeJob:
        assert run == "quickstart"
        return FakeJob()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the jobs and some text, as a reader of the README would be in."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number}.txt").write_text(f"text number {number} " * 400)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_understood(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real but for gangs and runs. Data that an earlier command of the page has made is there; a job on one rank trains
    two steps."""
    arguments = shlex.split(command)[1:]
    if arguments[0] != "data":
        for path in ("data/stdlib-bytes", "data/mine", "data/code", "data/network"):
            prepare(["text/*.txt"], path)
    if "python" in command and arguments[1] != "train-tokenizer":  # a small one in place of the tokenizer made before
        train_tokenizer(["text/*.txt"], "data/python-bpe.json", vocabulary=300)
        if arguments[1] != "prepare":
            prepare(["text/*.txt"], "data/python-bpe", "data/python-bpe.json")

    def run(job: JobConfig, *, launcher: str, address: str | None) -> int:
        make_plan(job)
        return run_job(job, launcher=launcher) if launcher == "inline" else 0

    def ask_run(name: str, command: str, *, directory: str, address: str | None) -> Status:
        assert load("jobs/quickstart.yaml").run.name == name
        return Status(run=name, state="running", step=1, num_steps=2)

    if arguments[0] == "trace":
        traced = ["run.name=traced", "run.trace_interval=1", *SMALL]
        assert main(["train", "jobs/tiny.yaml", "--launcher", "inline", *traced]) == 0
    if arguments[0] in ("checkpoint", "generate", "report"):
        assert main(["train", "jobs/tiny.yaml", "--launcher", "inline", *SMALL]) == 0
    for path in arguments[1:] if arguments[0] == "compare" else ():
        assert main(["train", "jobs/tiny.yaml", "--launcher", "inline", f"run.name={Path(path).name}", *SMALL]) == 0
    monkeypatch.setattr(gang_run, "run_job", run)
    monkeypatch.setattr(gang_run, "check_job", run)
    monkeypatch.setattr(mailbox, "ask_run", ask_run)
    monkeypatch.setattr(jobs, "ClusterJobs", FakeJobs)
    assert main([*arguments, *(SMALL if "inline" in arguments else [])]) == 0


def test_tiny_job_trains_in_one_process(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "jobs/tiny.yaml", "--launcher", "inline", "data.text=['text/*.txt']", "data.path=d"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "prepared d: " in printed
    assert "validation loss" in printed
    steps = [json.loads(line) for line in (place / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, 61))
    assert steps[-1]["loss"] < steps[0]["loss"] - 2
    assert (place / "runs/tiny/checkpoints/step-60").is_dir()
    for name in ("config.yaml", "plan.json", "events.jsonl", "logs/rank-0000.log"):
        assert (place / "runs/tiny" / name).is_file(), name


@pytest.mark.parametrize("job", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_job_has_a_plan(job: Path) -> None:
    assert make_plan(load(str(job))).mesh.size >= 1


def test_first_two_commands_set_themselves_up() -> None:
    first, second, *_ = commands("README.md")
    for command in (first, second):
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ")
    assert first.endswith(".venv/bin/raytrain3d train jobs/quickstart.yaml")
    assert second.endswith(".venv/bin/python -m pytest")
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page} links to {target}"


def test_the_chinese_readme_is_in_step() -> None:
    assert commands("README.zh-CN.md") == commands("README.md")


def test_sections_about_benchmarks_name_commands_that_exist() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    sections = re.findall(r"^## (.*)$", page, re.MULTILINE)
    assert "benchmarks/driver.py" in sections
    for section in sections:
        assert "__main__" in (ROOT / section).read_text()
    assert [line.split()[:2] for line in commands("docs/benchmarks.md")] == [["python", name] for name in sections]


def test_tested_versions_are_within_the_stated_ranges() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    stated = sum(project["optional-dependencies"].values(), project["dependencies"])
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    tested = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}
    for requirement in map(Requirement, stated):
        assert requirement.specifier.contains(tested[requirement.name]), requirement


@pytest.fixture
def on_path(place: Path) -> Iterator[dict[str, str]]:
    """Environment in which `raytrain3d` is this package, whether installed or not."""
    command = place / "bin" / "raytrain3d"
    command.parent.mkdir()
    command.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m raytrain3d \"$@\"\n")
    command.chmod(0o755)
    yield {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(3600)
def test_every_command_runs_in_full(place: Path, on_path: dict[str, str]) -> None:
    for command in ["raytrain3d train jobs/quickstart.yaml", *COMMANDS]:
        if command.split()[1] not in LIVE:
            done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=on_path)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_running_job_tells_its_status_moves_layers_stops_and_resumes(place: Path, on_path: dict[str, str]) -> None:
    def run(command: str) -> str:
        return subprocess.run(shlex.split(command), capture_output=True, text=True, env=on_path).stdout

    train = ["raytrain3d", "train", "jobs/quickstart.yaml", "--launcher", "local", "train.steps=300",
             "data.text=[text/*.txt]"]
    with subprocess.Popen(train, env=on_path, stdout=subprocess.PIPE, text=True) as job:
        while "state     running" not in run("raytrain3d status quickstart"):
            assert job.poll() is None
            time.sleep(1)
        assert "asked quickstart for stages of 4,2" in run("raytrain3d rebalance quickstart --layers 4,2")
        while "asked for stages 4,2" not in Path("runs/quickstart/events.jsonl").read_text():
            assert job.poll() is None
            time.sleep(1)
        assert "asked quickstart to stop" in run("raytrain3d stop quickstart")
        assert "the same command resumes it" in job.communicate(timeout=120)[0]
    assert job.returncode == 0
    assert "finished: 300 steps" in run(shlex.join(train))
