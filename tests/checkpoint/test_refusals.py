"""Every checkpoint that cannot be loaded says which file or parameter is wrong and why."""

import hashlib
import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain3d.checkpoint.identity import check_same_run
from raytrain3d.checkpoint.manifest import MANIFEST, Manifest
from raytrain3d.checkpoint.store import damage, read_into, read_manifest
from raytrain3d.plan.params import Rectangle


@pytest.fixture
def saved(tmp_path: Path, checkpoints: Any) -> str:
    """Directory of a good checkpoint."""
    directory: str = checkpoints.save(str(tmp_path), 5)
    return directory


@pytest.fixture
def reader(checkpoints: Any) -> Any:
    """A rank that wants everything."""
    return checkpoints.one_rank(checkpoints.config(), checkpoints.truth(checkpoints.config()))


def _rewrite(directory: str, change: Any) -> None:
    """Changes the manifest's body and vouches for it again, as an attacker or a bug could."""
    path = os.path.join(directory, MANIFEST)
    body = json.loads(Path(path).read_text())["manifest"]
    change(body)
    seal = f"sha256:{hashlib.sha256(json.dumps(body).encode()).hexdigest()}"
    Path(path).write_text(json.dumps({"format": 2, "checksum": seal, "manifest": body}))


def test_missing_shard(saved: str, reader: Any, refusal: Any) -> None:
    os.unlink(os.path.join(saved, "rank-0001.safetensors"))
    assert f"{saved}/rank-0001.safetensors is missing" in refusal(lambda: read_into(saved, reader.pieces))
    assert all(bool((buffer == -77.0).all()) for buffer in reader.buffers), "nothing was copied"


def test_missing_checkpoint(tmp_path: Path, reader: Any, refusal: Any) -> None:
    assert f"{tmp_path}/{MANIFEST} is missing" in refusal(lambda: read_into(str(tmp_path), reader.pieces))


def test_truncated_shard(saved: str, reader: Any, refusal: Any) -> None:
    path = os.path.join(saved, "rank-0000.safetensors")
    size = os.path.getsize(path)
    os.truncate(path, size - 1)
    assert refusal(lambda: read_into(saved, reader.pieces)) == (
        f"{path} has {size - 1} bytes, its manifest says {size}: it was cut or changed")


@pytest.mark.parametrize("where", [0, 30, -1])
def test_flipped_bit(saved: str, reader: Any, refusal: Any, where: int) -> None:
    path = Path(saved, "rank-0000.safetensors")
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(data)
    assert f"{path} is damaged" in refusal(lambda: read_into(saved, reader.pieces))


def test_a_shard_that_is_no_safetensors_file(saved: str, reader: Any, refusal: Any) -> None:
    path = Path(saved, "rank-0000.safetensors")
    path.write_bytes(random.Random(3).randbytes(path.stat().st_size))
    assert f"{path} is damaged: its header's checksum" in refusal(lambda: read_into(saved, reader.pieces))


def test_a_box_that_is_not_where_the_manifest_says(saved: str, reader: Any, refusal: Any) -> None:
    def swap(body: Any) -> None:
        one, two = (next(e for e in body["entries"] if e["name"] == f"blocks.0.mlp.{part}.weight"
                         and e["file"] == "rank-0000.safetensors") for part in ("gate", "down"))
        one["start"], two["start"] = two["start"], one["start"]
    _rewrite(saved, swap)
    assert f"{saved}/rank-0000.safetensors is damaged: the checksum of" in refusal(
        lambda: read_into(saved, reader.pieces))


def test_all_damage_is_listed_by_file(saved: str) -> None:
    assert damage(saved) == []
    first, second = (Path(saved, f"rank-000{rank}.safetensors") for rank in range(2))
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    second.unlink()
    assert [line.split(" ")[0] for line in damage(saved)] == [str(first), str(second)]
    Path(saved, MANIFEST).write_text("{")
    assert len(damage(saved)) == 1 and MANIFEST in damage(saved)[0]


def test_parameter_not_covered(saved: str, reader: Any, refusal: Any) -> None:
    # One of the boxes of a weight left out of the manifest: what is left of it must not pass.
    _rewrite(saved, lambda body: body["entries"].remove(next(
        e for e in body["entries"] if e["name"] == "blocks.1.attention.query.weight" and e["offset"] == [12, 0])))
    assert "does not hold" in (message := refusal(lambda: read_into(saved, reader.pieces)))
    assert "of blocks.1.attention.query.weight at (12, 0), shape (12, 24)" in message
    _rewrite(saved, lambda body: body.update(entries=[
        e for e in body["entries"] if (e["name"], e["kind"]) != ("embedding.tokens.weight", "exp_avg")]))
    assert f"{saved} does not hold exp_avg of embedding.tokens.weight at (0, 0)" in refusal(
        lambda: read_into(saved, reader.pieces))


def test_other_model(saved: str, reader: Any, refusal: Any) -> None:
    piece = reader.pieces[0]
    renamed = replace(piece, name="blocks.7.mlp.up.weight")
    assert "holds another model: it has no parameter blocks.7.mlp.up.weight" in refusal(
        lambda: read_into(saved, [renamed]))
    larger = replace(piece, rectangle=Rectangle(offset=(0, 0), shape=(37, 25)), tensor=torch.zeros(37, 25))
    assert "embedding.tokens.weight has shape (37, 24) there, this model's reaches to (37, 25)" in refusal(
        lambda: read_into(saved, [larger]))


@pytest.mark.parametrize(("change", "key"), [
    ({"name": "two"}, "run.name is 'one' there and 'two' in this"), ({"hidden": 48}, "model.hidden is 24 there and 48"),
    ({"seed": 3}, "train.seed is 1 there and 3"), ({"tied": True}, "model.tied_embeddings is False there and True")])
def test_a_checkpoint_of_another_run(saved: str, checkpoints: Any, refusal: Any, change: dict[str, Any],
                                     key: str) -> None:
    message = refusal(lambda: check_same_run(read_manifest(saved), saved, checkpoints.config(**change)))
    assert message.startswith(f"{saved} belongs to another run: {key}") and "run.directory" in message


def test_other_data(saved: str, checkpoints: Any, refusal: Any) -> None:
    config, manifest = checkpoints.config(), read_manifest(saved)
    check_same_run(manifest, saved, config, "data-1")
    check_same_run(manifest, saved, config)
    assert "data's fingerprint is 'data-1' there and 'data-2'" in refusal(
        lambda: check_same_run(manifest, saved, config, "data-2"))


def test_what_a_resumed_run_may_change(saved: str, checkpoints: Any) -> None:
    config = checkpoints.config()
    later = replace(config, train=replace(config.train, steps=99, sharding="optimizer", recompute="full", dtype="bf16"),
                    model=replace(config.model, dropout=0.1), mesh=replace(config.mesh, tensor=2, data=2))
    check_same_run(read_manifest(saved), saved, later)


def test_newer_format(saved: str, refusal: Any) -> None:
    path = Path(saved, MANIFEST)
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    assert refusal(lambda: read_manifest(saved)) == (
        f"{path} is not a valid manifest: written by a newer raytrain3d (format 3, this one reads format 2)")
    path.write_text(path.read_text().replace('"format": 3', '"format": "x"'))
    assert "its format is 'x', this raytrain3d reads format 2" in refusal(lambda: read_manifest(saved))


@pytest.mark.parametrize("name", ["../rank-0000.safetensors", "/etc/passwd", "rank-0000.safetensors/..", "rank-0.pt",
                                  "rank-0000.safetensors\n", ""])
def test_file_names_stay_in_the_directory(saved: str, refusal: Any, name: str) -> None:
    _rewrite(saved, lambda body: body["files"][0].update(name=name))
    assert f"file name {name!r} is not of the form" in refusal(lambda: read_manifest(saved))


@pytest.mark.parametrize(("change", "message"), [
    (lambda body: body.pop("step"), "must have exactly the fields"),
    (lambda body: body.update(extra=1), "must have exactly the fields"),
    (lambda body: body.update(step=True), "step of the manifest is True, not int"),
    (lambda body: body.update(step=-1), "step is -1"),
    (lambda body: body.update(files=[*body["files"], body["files"][0]]), "a file is listed twice"),
    (lambda body: body["entries"].append(body["entries"][0]), "an entry is listed twice"),
    (lambda body: body["files"][0].update(header_checksum="0"), "checksum of rank-0000.safetensors is malformed"),
    (lambda body: body["entries"][0].update(checksum="0"), "in rank-0000.safetensors is malformed"),
    (lambda body: body["files"][0].update(size=8), "is not inside its file"),
    (lambda body: body["entries"][0].update(start=-1), "is not inside its file"),
    (lambda body: body["entries"][0].update(kind="code"), "unknown kind 'code'"),
    (lambda body: body["entries"][0].update(dtype="int8"), "unknown dtype 'int8'"),
    (lambda body: body["entries"][0].update(file="rank-0009.safetensors"), "unknown file 'rank-0009.safetensors'"),
    (lambda body: body["entries"][0].update(name="x"), "unknown name 'x'"),
    (lambda body: body["entries"][0].update(offset=[30, 0]), "is not inside the parameter's shape (37, 24)"),
    (lambda body: body["entries"][0].update(offset=[0]), "is not inside the parameter's shape (37, 24)"),
    (lambda body: body["entries"][0].update(offset=[0, -1]), "not a list of numbers from 0"),
    (lambda body: body["entries"][0].update(shape=[10**30, 24]), "is not inside the parameter's shape (37, 24)"),
    (lambda body: body["parameters"].update({"head.norm.weight": [24.0]}), "not a list of numbers from 0")])
def test_malformed_manifests(saved: str, refusal: Any, change: Any, message: str) -> None:
    _rewrite(saved, change)
    assert message in refusal(lambda: read_manifest(saved))


def test_a_manifest_survives_its_text(saved: str) -> None:
    manifest = read_manifest(saved)
    assert Manifest.from_json(manifest.to_json(), "x") == manifest


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, '{"format": 2}', '{"format": 2' + "0" * 5000 + "}",
                                  '{"format": true}'])
def test_what_is_no_manifest_at_all(saved: str, refusal: Any, text: str) -> None:
    Path(saved, MANIFEST).write_text(text)
    assert f"{saved}/{MANIFEST} is not a valid manifest" in refusal(lambda: read_manifest(saved))
