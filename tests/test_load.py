"""Reading job files: types, overrides, interpolation, what is refused and how, and the way back to YAML."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytrain3d.config import DataConfig, JobConfig, ModelConfig, NetworkConfig, RunConfig, TrainConfig
from raytrain3d.convert import key_paths
from raytrain3d.errors import ConfigError
from raytrain3d.load import dump, load

JOB = """
run: {name: one}
model: {vocabulary: 257, hidden: 64, blocks: 4, heads: 4, feed_forward: 128}
train: {steps: 20, global_batch: 8, sequence: 32}
data: {path: somewhere}
"""


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., JobConfig]:
    def read(*overrides: str, text: str = JOB) -> JobConfig:
        file = tmp_path / "job.yaml"
        file.write_text(text)
        return load(str(file), overrides)
    return read


@pytest.fixture
def refusal(job: Callable[..., JobConfig]) -> Callable[..., str]:
    def message(*overrides: str, text: str = JOB) -> str:
        with pytest.raises(ConfigError) as caught:
            job(*overrides, text=text)
        return str(caught.value)
    return message


def plain() -> JobConfig:
    return JobConfig(run=RunConfig(name="one"), data=DataConfig(path="somewhere"),
                     model=ModelConfig(vocabulary=257, hidden=64, blocks=4, heads=4, feed_forward=128),
                     train=TrainConfig(steps=20, global_batch=8, sequence=32))


def test_file_becomes_typed_sections(job: Callable[..., JobConfig]) -> None:
    assert job() == plain()


def test_overrides_win_and_later_ones_most(job: Callable[..., JobConfig]) -> None:
    config = job("train.steps=50", "mesh.tensor=2", "train.steps=60", "model.rotary_scaling.factor=4",
                 "pipeline.layers=[2, 4]", "mesh.pipeline=2", "network.environment={A: 'b'}",
                 "optimizer.clip_norm=null")
    assert (config.train.steps, config.mesh.tensor, config.pipeline.layers) == (60, 2, (2, 4))
    assert config.model.rotary_scaling is not None
    assert config.model.rotary_scaling.factor == 4.0
    assert isinstance(config.model.rotary_scaling.factor, float)
    assert config.network.environment == {"A": "b"}
    assert config.optimizer.clip_norm is None


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001", "'1e-4'"])
def test_every_way_to_write_a_small_number(job: Callable[..., JobConfig], text: str) -> None:
    assert job(f"learning_rate.peak={text}").learning_rate.peak == 1e-4


def test_whole_numbers_with_exponent(job: Callable[..., JobConfig]) -> None:
    steps = job("train.steps=2e3").train.steps
    assert steps == 2000
    assert isinstance(steps, int)


def test_interpolation_sees_overrides(job: Callable[..., JobConfig]) -> None:
    config = job("run.name=two", text=JOB.replace("somewhere", "'data/${run.name}-${train.sequence}'"))
    assert config.data.path == "data/two-32"


def test_absent_section_is_all_defaults(job: Callable[..., JobConfig]) -> None:
    assert job(text=JOB + "mesh:\n") == plain()


@pytest.mark.parametrize(("override", "parts"), [
    ("train.stesp=3", ["'train.stesp'", "'train.steps'"]),
    ("moddel.hidden=3", ["'moddel'", "'model'"]),
    ("model.rotary_scaling.facto=3", ["'model.rotary_scaling.facto'", "'model.rotary_scaling.factor'"]),
    ("train.tensor=2", ["'train.tensor'", "'mesh.tensor'"]),
    ("mesh.zzz=2", ["'mesh.zzz'", "valid here are data, pipeline, tensor"]),
    ("train.steps", ["'train.steps'", "key=value"]),
    ("train..steps=3", ["'train..steps=3'", "key=value"]),
    ("train.steps=[1", ["'train.steps=[1'", "no YAML"]),
    ("train.steps=ten", ["train.steps is 'ten'", "whole number"]),
    ("train.steps=1.5", ["train.steps is 1.5", "whole number"]),
    ("train.steps=true", ["train.steps is True", "whole number"]),
    ("train.steps=.inf", ["train.steps is inf", "whole number"]),
    ("train.steps.x=1", ["train.steps is {'x': 1}", "whole number"]),
    ("train.steps=???", ["train.steps is missing", "whole number"]),
    ("train=3", ["train is 3", "section"]),
    ("model=null", ["model.vocabulary is missing"]),
    ("train.dtype=fp16", ["train.dtype is 'fp16'", "fp32, bf16, fp64"]),
    ("train.dtype=[fp32]", ["train.dtype is ['fp32']", "fp32, bf16, fp64"]),
    ("learning_rate.peak=high", ["learning_rate.peak is 'high'", "number"]),
    ("learning_rate.peak=.nan", ["learning_rate.peak is nan", "number"]),
    ("checkpoint.resume=1", ["checkpoint.resume is 1", "true or false"]),
    ("run.name=2024", ["run.name is 2024", "'2024'"]),
    ("data.text=a.txt", ["data.text is 'a.txt'", "list"]),
    ("pipeline.layers=[1, b]", ["pipeline.layers[1] is 'b'", "whole number"]),
    ("network.environment=[A]", ["network.environment is ['A']", "mapping"]),
    ("network.environment={A: 1}", ["network.environment.A is 1", "'1'"]),
    ("run.name=${run.nam}", ["run.name", "'run.nam' not found"]),
    ("run.name=${run.name}", ["run.name", "Recursive"]),
    ("run.name=${", ["run.name=${", "no YAML"]),
    ("run.name=${what:3}", ["run.name", "what"]),
    ("run.name=../one", ["run.name is '../one'", "letters"]),
])
def test_bad_value_is_named_with_what_is_valid(refusal: Callable[..., str], override: str, parts: list[str]) -> None:
    message = refusal(override)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(("text", "parts"), [
    ("", ["no sections"]),
    ("word", ["no sections"]),
    ("- 1\n- 2\n", ["no sections"]),
    ("run: {name: a}\ntrain: [1\n", ["line 3"]),
    ("run: {name: a}\nrun: {name: b}\n", ["line 2", "duplicate key run"]),
    ("run:\n  name: a\n  name: b\n", ["line 3", "duplicate key name"]),
    ("run:\n  name: a\n   directory: b\n", ["line 3"]),
    ("run: !!python/name:os.system\n", ["line 1", "python"]),
    ("run: *nobody\n", ["line 1", "nobody"]),
    ("run: &a\n  again: *a\n", ["recursive"]),
    ("run: \x01\n", ["special characters"]),
    (JOB.replace("run: {name: one}", ""), ["run is missing", "name"]),
    (JOB.replace("steps: 20, ", ""), ["train.steps is missing", "whole number"]),
    (JOB + "train.steps: 5\n", ["'train.steps'", "train: {steps: ...}"]),
    (JOB + "1: 2\n", ["unknown key '1'"]),
])
def test_bad_file_is_named_with_the_place(refusal: Callable[..., str], text: str, parts: list[str]) -> None:
    message = refusal(text=text)
    assert all(part in message for part in parts), message


def test_missing_directory_and_binary_file(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"run: \xff\xfe")
    none, binary = tmp_path / "none.yaml", tmp_path / "binary"
    for path, part in ((none, "No such file"), (tmp_path, "directory"), (binary, "UTF-8")):
        with pytest.raises(ConfigError, match=part) as caught:
            load(str(path), [])
        assert str(path) in str(caught.value)


@given(text=st.text(max_size=60))
def test_any_text_is_a_job_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    with pytest.raises(ConfigError):
        load(str(file), [])


@given(override=st.text(max_size=30) | st.sampled_from(sorted(key_paths(JobConfig))).flatmap(
    lambda key: st.text(max_size=12).map(lambda value: f"{key}={value}")))
@settings(max_examples=300)
def test_any_override_gives_a_job_or_a_config_error(tmp_path_factory: pytest.TempPathFactory, override: str) -> None:
    file = tmp_path_factory.getbasetemp() / "good.yaml"
    file.write_text(JOB)
    try:
        assert isinstance(load(str(file), [override]), JobConfig)
    except ConfigError as error:
        assert str(error)


TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12) | st.sampled_from(
    ["1e-4", "null", "yes", "010", "${run.name}", "\\${x}", "a: b", "# c", "'", '"', "???", "\\", "2024-01-01",
     "\\\\${a}"])


@given(path=TEXT.filter(lambda text: text != "???"),
       environment=st.dictionaries(TEXT, TEXT, max_size=3), text=st.lists(TEXT, max_size=3),
       rate=st.floats(min_value=1e-300, max_value=1e300), layers=st.sampled_from([None, (6,)]))
def test_dump_and_load_give_the_same_job(tmp_path_factory: pytest.TempPathFactory, path: str, rate: float,
                                         environment: dict[str, str], text: list[str],
                                         layers: tuple[int, ...] | None) -> None:
    job = plain()
    job = replace(job, data=DataConfig(path=path, text=tuple(text)), network=NetworkConfig(environment=environment),
                  learning_rate=replace(job.learning_rate, peak=rate), pipeline=replace(job.pipeline, layers=layers))
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_text(dump(job), encoding="utf-8")
    assert load(str(file), []) == job
