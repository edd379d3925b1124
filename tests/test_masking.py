"""What is taken out of logs and stored configurations, and what stays."""

import json

import pytest

from raytrain3d.masking import MASK, masked


@pytest.mark.parametrize("name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "RAY_AUTH_TOKEN",
                                  "wandb_api_key", "DB_PASSWORD", "GOOGLE_APPLICATION_CREDENTIALS", "KEY",
                                  "aws_session_token"])
def test_secrets_by_name(name: str) -> None:
    assert masked({name: "geheim", "list": [{name: "geheim"}]}) == {name: MASK, "list": [{name: MASK}]}


@pytest.mark.parametrize(("name", "value"), [
    ("NCCL_DEBUG", "INFO"), ("RAY_AUTH_TOKEN_PATH", "/home/me/token"), ("RAY_AUTH_MODE", "token"), ("kv_heads", 2),
    ("tokenizer", "bytes"), ("tokens", 5), ("MONKEY", "x"), ("path", "s3://bucket/runs?region=eu"), ("HF_TOKEN", "")])
def test_what_is_no_secret_stays(name: str, value: object) -> None:
    assert masked({name: value}) == {name: value}


def test_secrets_inside_values() -> None:
    assert masked("s3://id:geheim@bucket/runs") == f"s3://{MASK}@bucket/runs"
    assert masked("s3://bucket/runs?access_key=a&region=eu&secret_key=b") == (
        f"s3://bucket/runs?access_key={MASK}&region=eu&secret_key={MASK}")
    text = json.dumps({"runtime_env": {"env_vars": {"HF_TOKEN": "geheim", "N": "1"}}})
    assert json.loads(masked({"RAY_JOB_CONFIG_JSON_ENV_VAR": text})["RAY_JOB_CONFIG_JSON_ENV_VAR"]) == {
        "runtime_env": {"env_vars": {"HF_TOKEN": MASK, "N": "1"}}}
