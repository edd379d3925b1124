"""Checks that sections of a configuration share. A failed one is a ConfigError naming the key, the value and what is valid.
"""

from raytrain3d.errors import ConfigError


def require(valid: bool, key: str, value: object, want: str) -> None:
    if not valid:
        raise ConfigError(f"{key} is {value!r}: {want}")


def positive(section: str, **values: float | None) -> None:
    for name, value in values.items():
        if value is not None:
            require(value > 0, f"{section}.{name}", value, "must be above 0")


def fraction(section: str, **values: float) -> None:
    for name, value in values.items():
        require(0 <= value < 1, f"{section}.{name}", value, "must be at least 0 and below 1")
