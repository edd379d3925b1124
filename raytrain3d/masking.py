"""Secrets taken out of what is logged or stored: by the name of a key, and inside URIs."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raytrain3d.config import JobConfig

MASK = "***"
_SECRET_NAME = re.compile(r"TOKEN(?!IZER)|SECRET|PASSW|CREDENTIAL|PRIVATE|SIGNATURE|COOKIE|(^|_)(API|ACCESS)?_?KEY($|_)",
                          re.IGNORECASE)
_PASSWORD_IN_URI = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_SECRET_IN_QUERY = re.compile(r"(?<=[?&])(\w*(?:token(?!iz)|secret|passw|key|signature|credential)\w*)=[^&\s]*",
                              re.IGNORECASE)
SHOWN_PREFIXES = ("RAY_", "NCCL_", "GLOO_", "TORCH_", "CUDA_", "OMP_", "MKL_", "FI_", "AWS_", "GOOGLE_", "HF_", "PYTHON",
                  "LD_", "KUBERNETES_")
"""Beginnings of the environment variables that can change what a job does."""


def masked(value: Any, name: str = "") -> Any:
    """`value` (of plain JSON types) with its secrets as `***`. name: of the key that holds it. A path that a variable such
    as RAY_AUTH_TOKEN_PATH names is no secret."""
    match value:
        case Mapping():
            return {key: masked(item, str(key)) for key, item in value.items()}
        case list() | tuple():
            return type(value)(masked(item, name) for item in value)
        case str() if value and _SECRET_NAME.search(name) and not name.upper().endswith(("_PATH", "_FILE", "_MODE")):
            return MASK
        case str() if value.startswith("{"):
            return _masked_json(value)
        case str():
            return _SECRET_IN_QUERY.sub(rf"\1={MASK}", _PASSWORD_IN_URI.sub(MASK, value))
    return value


def _masked_json(text: str) -> str:
    """Ray hands a job its settings, environment included, as JSON in a variable."""
    try:
        return json.dumps(masked(json.loads(text)))
    except ValueError:
        return text


def masked_environment(config: JobConfig) -> JobConfig:
    """`config` with the secrets of `network.environment` masked: what is stored in run directories and checkpoints."""
    environment: dict[str, str] = masked(config.network.environment)
    return replace(config, network=replace(config.network, environment=environment))


def job_environment() -> dict[str, str]:
    """The variables of this process that can change what a job does, secrets masked."""
    shown: dict[str, str] = masked({name: value for name, value in sorted(os.environ.items())
                                    if name.startswith(SHOWN_PREFIXES) or name in ("PATH", "VIRTUAL_ENV")})
    return shown
