"""From a YAML file and dotted overrides to a typed JobConfig, and back.

OmegaConf reads the YAML and resolves `${...}`; `convert.py` makes it typed. A file that is no YAML, an override that is
no `key=value` and an interpolation that leads nowhere become ConfigErrors here.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from raytrain3d.config import JobConfig, ModelConfig, RotaryScalingConfig
from raytrain3d.convert import to_config, to_field
from raytrain3d.errors import CheckpointError, ConfigError
from raytrain3d.model.huggingface_config import CONFIG, decided, model_config, read_settings

_REQUIRED = {"vocabulary", "hidden", "blocks", "heads", "feed_forward"}


def load(path: str, overrides: Sequence[str] = ()) -> JobConfig:
    """The job in the YAML file `path`, changed by overrides such as `train.steps=50`. ConfigError if it is none."""
    raw = _parse(_read(path), path)
    for override in overrides:
        _override(raw, override)
    return to_config(_resolve(raw, path))


def load_stored(stored: Mapping[str, Any], where: str, overrides: Sequence[str] = ()) -> JobConfig:
    """The job whose plain values `stored` are, changed by overrides; `where` names the place in messages."""
    raw = _plain(dict(stored))
    for override in overrides:
        _override(raw, override)
    return to_config(_resolve(raw, where))


def dump(config: JobConfig) -> str:
    """YAML text of every key, from which `load` makes an equal configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(asdict(config))))


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"job file {path!r} cannot be read ({error.strerror}): name a YAML file such as "
                          "jobs/quickstart.yaml") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"job file {path!r} is not a text file (byte {error.start} is not UTF-8)") from None


def _parse(text: str, path: str) -> dict[Any, Any]:
    try:
        # A file with nothing but one word has no mapping for OmegaConf to read, so its type is asked first.
        if not isinstance(yaml.compose(text, Loader=yaml.SafeLoader), yaml.MappingNode):
            raise ConfigError(f"job file {path!r} has no sections: it must be a YAML mapping with run, model, train, "
                              "data")
        found = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"job file {path!r}{_reason(error)}") from None
    assert isinstance(found, dict)
    return found


def _reason(error: Exception) -> str:
    """` line 3, column 7: ...` of a YAML error, `: ...` of another."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f" line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return f": {str(error).splitlines()[0]}"


def _override(raw: dict[Any, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not all((*sections, name)):
        raise ConfigError(f"override {text!r}: write key=value, such as train.steps=50")
    for section in sections:
        if not isinstance(raw.get(section), dict):
            raw[section] = {}
        raw = raw[section]
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"override {text!r} has a value that is no YAML{_reason(error)}") from None
    raw[name] = parsed["value"]


def _resolve(raw: dict[Any, Any], path: str) -> Any:
    """`raw` with every `${...}` replaced. Missing values (`???`) are left out."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        key = getattr(error, "full_key", None)
        raise ConfigError(f"job file {path!r}, key {key}{_reason(error)}") from None
    model = resolved.get("model") if isinstance(resolved, dict) else None
    if isinstance(model, dict) and isinstance(model.get("from_huggingface"), str):
        _fill_from_huggingface(model, model["from_huggingface"])
    return resolved


def _fill_from_huggingface(given: dict[Any, Any], directory: str) -> None:
    """Adds to the keys of the section `model` those that the model in `directory` decides."""
    if not os.path.exists(directory) and given.keys() >= _REQUIRED:
        return  # the configuration of a run that has started from it, which needs it no more
    try:
        model = model_config(read_settings(directory), os.path.join(directory, CONFIG))
    except CheckpointError as error:
        raise ConfigError(f"model.from_huggingface is {directory!r}: {error}") from None
    for name, value in decided(model).items():
        if given.get(name) in (None, "???"):
            given[name] = asdict(value) if isinstance(value, RotaryScalingConfig) else value
        elif (wanted := to_field(ModelConfig, name, given[name], f"model.{name}")) != value:
            raise ConfigError(f"model.{name} is {wanted!r}, but the model in {directory} (model.from_huggingface) has "
                              f"{value!r}: leave the key out")


def _plain(value: Any) -> Any:
    """Lists for tuples, and strings in which OmegaConf sees no interpolation."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # A backslash hides `${` from OmegaConf; backslashes before it are then read as escaped ones.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value
