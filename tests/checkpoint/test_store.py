"""Saving under one layout and loading under another, to the bit; what makes a checkpoint exist; what ends one."""

import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from raytrain3d.checkpoint.layout import Piece
from raytrain3d.checkpoint.retention import superfluous
from raytrain3d.checkpoint.shard import write_file
from raytrain3d.checkpoint.remote import RemoteFolder
from raytrain3d.checkpoint.store import (
    clean,
    commit,
    damage,
    newest,
    prune,
    read_into,
    read_manifest,
    record_loss,
    remove,
    step_directory,
    steps,
    write_shard,
)
from raytrain3d.errors import CheckpointError
from raytrain3d.plan.params import Rectangle


def _random_layout(rng: random.Random) -> dict[str, Any]:
    cuts = [0, *sorted(rng.sample(range(1, 4), rng.randrange(4))), 4]
    return {"tensor": rng.choice((1, 2, 4)), "data": rng.choice((1, 2, 3)), "sharded": rng.random() < 0.7,
            "stages": [range(a, b) for a, b in pairwise(cuts)]}


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_reads_what_any_layout_wrote_to_the_bit(seed: int, tmp_path: Path, checkpoints: Any) -> None:
    rng = random.Random(seed)
    config = checkpoints.config(dtype=("fp32", "bf16", "fp64")[seed % 3], tied=rng.random() < 0.5,
                                vocabulary=rng.choice((37, 64, 9)))
    truth, directory = checkpoints.truth(config, seed), step_directory(str(tmp_path), 5)
    old = checkpoints.ranks(config, truth, **_random_layout(rng))
    for rank in old:
        checkpoints.fill(rank, truth)
    receipts = [write_shard(directory, i, rank.pieces, step=5) for i, rank in enumerate(old)]
    commit(directory, 5, receipts, config=config)
    for rank in checkpoints.ranks(config, truth, **_random_layout(rng)):
        read_into(directory, rank.pieces)
        checkpoints.check(rank, truth)


def test_special_bits_survive(tmp_path: Path) -> None:
    for dtype, integers in ((torch.bfloat16, torch.int16), (torch.float32, torch.int32), (torch.float64, torch.int64)):
        bits = torch.randint(torch.iinfo(integers).min, torch.iinfo(integers).max, (3, 5), dtype=integers)
        tensor = bits.view(dtype)
        piece = Piece(name="a", kind="weight", rectangle=Rectangle(offset=(0, 0), shape=(3, 5)), tensor=tensor)
        write_file(str(tmp_path / "f"), "f", [piece])
        with safe_open(str(tmp_path / "f"), framework="pt") as file:
            assert torch.equal(file.get_tensor("a/weight@0,0").view(integers), bits)


def test_a_shard_is_a_readable_safetensors_file_with_aligned_tensors(tmp_path: Path) -> None:
    wide = torch.arange(12.0).view(3, 4)
    pieces = [Piece(name="x.weight", kind="weight", rectangle=Rectangle(offset=(2,), shape=(3,)),
                    tensor=torch.ones(3, dtype=torch.bfloat16)),
              Piece(name="blocks.3.attention.query.weight", kind="exp_avg",
                    rectangle=Rectangle(offset=(0, 6), shape=(3, 2)), tensor=wide[:, 1:3])]
    receipt = write_shard(str(tmp_path), 3, pieces, step=1)
    assert receipt.file is not None and receipt.file.size == os.path.getsize(tmp_path / "rank-0003.safetensors")
    with safe_open(str(tmp_path / "rank-0003.safetensors"), framework="pt") as file:
        assert set(file.keys()) == {"x.weight/weight@2", "blocks.3.attention.query.weight/exp_avg@0,6"}
        assert torch.equal(file.get_tensor("blocks.3.attention.query.weight/exp_avg@0,6"), wide[:, 1:3])
    assert [entry.dtype for entry in receipt.entries] == ["float32", "bfloat16"]


def test_a_rank_with_nothing_to_write_has_a_receipt_without_file(tmp_path: Path) -> None:
    empty = Piece(name="a", kind="weight", rectangle=Rectangle(offset=(4, 0), shape=(0, 3)), tensor=torch.zeros(0, 3))
    receipt = write_shard(str(tmp_path), 0, [empty], step=2)
    assert receipt.file is None and receipt.entries == () and os.listdir(tmp_path) == []


def test_pieces_that_begin_at_the_same_place_are_a_bug(tmp_path: Path) -> None:
    piece = Piece(name="a", kind="weight", rectangle=Rectangle(offset=(0,), shape=(2,)), tensor=torch.zeros(2))
    with pytest.raises(ValueError, match="same place"):
        write_shard(str(tmp_path), 0, [piece, piece], step=2)
    assert os.listdir(tmp_path) == []


def test_only_a_manifest_makes_a_checkpoint(tmp_path: Path, checkpoints: Any) -> None:
    run = str(tmp_path)
    assert newest(run) is None and steps(run) == []
    for step in (3, 20, 100):
        checkpoints.save(run, step)
    # A crash after all shards were written, and one while the first was.
    os.unlink(tmp_path / "checkpoints" / "step-100" / "manifest.json")
    (tmp_path / "checkpoints" / "step-300").mkdir()
    (tmp_path / "checkpoints" / "step-300" / ".rank-0000.safetensors.partial").write_bytes(b"half")
    (tmp_path / "checkpoints" / "step-007").mkdir()
    assert (newest(run), steps(run)) == (20, [3, 20])
    assert clean(run) == [100, 300]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step-007", "step-20", "step-3"]
    assert clean(run) == []


def test_a_crash_while_writing_leaves_no_file(tmp_path: Path, checkpoints: Any,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(os, "fsync", fail)
    config = checkpoints.config()
    rank = checkpoints.one_rank(config, checkpoints.truth(config))
    (tmp_path / "step").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*rank-0000.safetensors: No space left on device"):
        write_shard(str(tmp_path / "step"), 0, rank.pieces, step=1)
    assert os.listdir(tmp_path / "step") == []


def test_an_unfinished_save_can_be_repeated_but_a_checkpoint_is_never_overwritten(tmp_path: Path,
                                                                                 checkpoints: Any) -> None:
    directory = checkpoints.save(str(tmp_path), 4)
    with pytest.raises(CheckpointError, match="step-4 already holds a checkpoint"):
        checkpoints.save(str(tmp_path), 4)
    os.unlink(os.path.join(directory, "manifest.json"))
    checkpoints.save(str(tmp_path), 4, seed=2)
    config = checkpoints.config()
    rank = checkpoints.one_rank(config, checkpoints.truth(config))
    read_into(directory, rank.pieces)
    checkpoints.check(rank, checkpoints.truth(config, 2))


def test_prune_keeps_the_newest_and_what_is_not_ours(tmp_path: Path, checkpoints: Any) -> None:
    run = str(tmp_path)
    for step in (1, 2, 10):
        checkpoints.save(run, step)
    assert prune(run, None) == [] and prune(run, 3) == []
    note = tmp_path / "checkpoints" / "step-1" / "note.txt"
    note.write_text("mine")
    assert prune(run, 1) == [1, 2]
    assert steps(run) == [10] and os.listdir(note.parent) == ["note.txt"]
    assert not note.parent.with_name("step-2").exists()
    remove(run, 10)
    assert newest(run) is None


def test_what_is_kept() -> None:
    def rest(steps: list[int], losses: dict[int, float] | None = None, **keep: int | None) -> list[int]:
        rules = {"keep": None, "keep_every": None, "keep_best": None, **keep}
        gone = superfluous(steps, losses or {}, **rules)
        return [step for step in steps if step not in gone]

    steps = list(range(5, 55, 5))
    assert rest(steps) == steps == rest(steps, keep_every=20)
    assert rest(steps, keep=3) == [40, 45, 50]
    assert rest(steps, keep=1, keep_every=20) == [20, 40, 50]
    losses = {5: 1.0, 10: 3.0, 30: 2.0, 50: 2.5, 99: 0.1}
    assert rest(steps, losses, keep=1, keep_best=1) == [5, 50]
    assert rest(steps, losses, keep=1, keep_best=3, keep_every=20) == [5, 20, 30, 40, 50]
    assert rest(steps, {30: 2.0, 40: 2.0}, keep=1, keep_best=1) == [30, 50]


def test_the_best_are_found_by_their_manifests(tmp_path: Path, checkpoints: Any) -> None:
    run = str(tmp_path)
    for step, loss in ((1, 4.0), (2, 3.0), (3, float("nan")), (4, 3.5), (5, None)):
        directory = checkpoints.save(run, step)
        if loss is not None:
            record_loss(directory, loss)
    assert prune(run, 1, keep_best=1) == [1, 3, 4]
    assert prune(run, 1, keep_best=1, ignore={5}) == []
    assert steps(run) == [2, 5] and read_manifest(step_directory(run, 2)).validation_loss == 3.0
    assert damage(step_directory(run, 2)) == []


def test_removal_deletes_the_manifest_first(tmp_path: Path, checkpoints: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.save(str(tmp_path), 1)
    gone: list[str] = []
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path: (gone.append(os.path.basename(path)), unlink(path)))
    remove(str(tmp_path), 1)
    assert gone == ["manifest.json", "rank-0000.safetensors", "rank-0001.safetensors"]


def test_commit_refuses_mixed_steps_and_missing_ranks(tmp_path: Path, checkpoints: Any) -> None:
    config, directory = checkpoints.config(), str(tmp_path)
    truth = checkpoints.truth(config)
    ranks = checkpoints.ranks(config, truth, tensor=2, data=1, stages=[range(4)], sharded=False)
    receipts = [write_shard(directory, i, rank.pieces, step=7) for i, rank in enumerate(ranks)]
    with pytest.raises(CheckpointError, match=r"rank 0 saved step 7, .*of step 8"):
        commit(directory, 8, receipts, config=config)
    other = write_shard(directory, 1, ranks[1].pieces, step=6)
    with pytest.raises(CheckpointError, match="rank 1 saved step 6"):
        commit(directory, 7, [receipts[0], other], config=config)
    with pytest.raises(CheckpointError, match=r"incomplete: no rank wrote weight of embedding.tokens.weight"):
        commit(directory, 7, receipts[:1], config=config)
    with pytest.raises(CheckpointError, match="incomplete"):
        commit(directory, 7, [], config=config)
    assert not os.path.exists(os.path.join(directory, "manifest.json"))
    commit(directory, 7, receipts, config=config, data="d", skipped_steps=[3])
    manifest = read_manifest(directory)
    assert (manifest.step, manifest.run, manifest.data, manifest.skipped_steps) == (7, "one", "d", (3,))
    assert manifest.config["model"]["hidden"] == 24


def test_a_remote_filesystem_holds_the_same_checkpoints(tmp_path: Path, checkpoints: Any) -> None:
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
    run = RemoteFolder(SubTreeFileSystem(str(tmp_path), LocalFileSystem()), "runs/one")
    config = checkpoints.config()
    truth = checkpoints.truth(config)
    ranks = checkpoints.ranks(config, truth, tensor=1, data=2, stages=[range(4)], sharded=True)
    assert newest(run) is None
    for step in (1, 2):
        folder = run.child("checkpoints").child(f"step-{step}")
        for rank in ranks:
            checkpoints.fill(rank, truth)
        receipts = [write_shard(folder, i, rank.pieces, step=step) for i, rank in enumerate(ranks)]
        assert newest(run) == (step - 1 or None)
        commit(folder, step, receipts, config=config)
    assert sorted(os.listdir(tmp_path / "runs/one/checkpoints/step-2")) == [
        "manifest.json", "rank-0000.safetensors", "rank-0001.safetensors"]
    assert prune(run, 1) == [1] and steps(run) == [2]
    assert os.listdir(tmp_path / "runs/one/checkpoints") == ["step-2"]
    rank = checkpoints.one_rank(config, truth)
    read_into(folder, rank.pieces)
    checkpoints.check(rank, truth)
    folder.remove("rank-0001.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-0001.safetensors is missing"):
        read_into(folder, rank.pieces)


def test_a_file_uri_is_a_path(tmp_path: Path, checkpoints: Any) -> None:
    run = f"file://{tmp_path}/a%20run"
    checkpoints.save(run, 6)
    assert newest(run) == newest(str(tmp_path / "a run")) == 6
