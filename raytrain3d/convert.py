"""From plain values, as YAML gives them, to the typed sections of a JobConfig.

The type hints of the dataclasses in `config.py` are the only schema. An unknown key, a value of the wrong type and a
missing key become a ConfigError that names the key path, the value and what would be valid.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar, Union

from raytrain3d.config import JobConfig
from raytrain3d.errors import ConfigError

T = TypeVar("T")


def to_config(raw: object) -> JobConfig:
    """The job that nested dictionaries describe; `???` stands for a value not given."""
    return to_section(JobConfig, raw, "")


def to_section(kind: type[T], raw: object, key: str) -> T:
    """The section that a dictionary at the key path `key` describes."""
    section: T = _section(kind, raw, key)
    return section


def to_field(section: type, name: str, raw: object, key: str) -> Any:
    """The value of one field of a section; `key` is its key path."""
    return _convert(typing.get_type_hints(section)[name], raw, key)


def _convert(kind: Any, value: Any, key: str) -> Any:
    """`value` as the type hint `kind` wants it. ConfigError names `key`."""
    if dataclasses.is_dataclass(kind):
        return _section(kind, value, key)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        section = next((part for part in arguments if dataclasses.is_dataclass(part)), None)
        kind = section if section is not None and isinstance(value, dict) else arguments[0]
        return None if value is None else _convert(kind, value, key)
    if origin is Literal:
        if isinstance(value, bool) and {"on", "off"} <= set(arguments):
            value = "on" if value else "off"  # YAML reads these words as truth values
        return value if value in arguments and isinstance(value, str) else _wrong(key, value, _one_of(arguments))
    if origin is tuple:
        if not isinstance(value, list):
            _wrong(key, value, f"must be a list, such as [{'a, b' if arguments[0] is str else '1, 2'}]")
        return tuple(_convert(arguments[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            _wrong(key, value, f"must be a mapping of names to {'strings' if arguments[1] is str else 'numbers'}")
        return {_convert(str, name, f"{key} (a name)"): _convert(arguments[1], item, f"{key}.{name}")
                for name, item in value.items()}
    return _scalar(kind, value, key)


def _scalar(kind: Any, value: Any, key: str) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        return value if isinstance(value, bool) else _wrong(key, value, "must be true or false")
    if kind is str:
        want = f"must be a string: put it in quotes ('{value}')" if number else "must be a string"
        return value if isinstance(value, str) else _wrong(key, value, want)
    if kind is int:
        whole = number and math.isfinite(value) and value == int(value)
        return int(value) if whole else _wrong(key, value, "must be a whole number")
    assert kind is float, f"{key}: config.py has a type that load.py does not know: {kind}"
    try:
        result = float(value) if number or isinstance(value, str) else math.nan
    except (ValueError, OverflowError):
        result = math.nan
    return result if math.isfinite(result) else _wrong(key, value, "must be a number")


def _section(kind: Any, value: Any, key: str) -> Any:
    value = {} if value is None else value
    if not isinstance(value, dict):
        _wrong(key, value, f"must be a section with keys such as {', '.join(_names(kind)[:3])}")
    hints = typing.get_type_hints(kind)
    for name in value:
        if name not in hints:
            _unknown(kind, str(name), _join(key, str(name)))
    given = {name: _convert(hints[name], item, _join(key, name)) for name, item in value.items() if item != "???"}
    for field in dataclasses.fields(kind):
        if field.name not in given and _required(field):
            raise ConfigError(f"{_join(key, field.name)} is missing: {_want(hints[field.name])}")
    return kind(**given)


def _wrong(key: str, value: object, want: str) -> typing.NoReturn:
    raise ConfigError(f"{key} is {value!r}: {want}")


def _unknown(kind: Any, name: str, key: str) -> typing.NoReturn:
    paths = list(key_paths(JobConfig))
    if name in paths:
        raise ConfigError(f"unknown key {key!r}: in a file write sections, {name.replace('.', ': {', 1)}: ...}}")
    near = [_join(key.removesuffix(name).rstrip("."), near) for near in difflib.get_close_matches(name, _names(kind))]
    elsewhere = [path for path in paths if path.rpartition(".")[2] == name]
    nearest = near or elsewhere
    valid = f"valid here are {', '.join(_names(kind))}"
    raise ConfigError(f"unknown key {key!r}: " + (f"did you mean {nearest[0]!r}?" if nearest else valid))


def key_paths(kind: Any, prefix: str = "") -> Iterator[str]:
    """Every key path below a section class, sections included: `run`, `run.name`, ..."""
    for name, hint in typing.get_type_hints(kind).items():
        yield prefix + name
        nested = next((part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)), None)
        if nested is not None:
            yield from key_paths(nested, f"{prefix}{name}.")


def _required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _want(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        needed = [field.name for field in dataclasses.fields(hint) if _required(field)]
        return f"the job needs this section, with {', '.join(needed)}"
    return {int: "give a whole number", float: "give a number", str: "give a string"}.get(hint, "give a value")


def _names(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _one_of(choices: Sequence[object]) -> str:
    return f"must be one of {', '.join(map(str, choices))}"
