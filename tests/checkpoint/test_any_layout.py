"""What any layout saves, any layout loads, to the bit; and training goes on as if it had always had the new layout.

The normal run takes some of the pairs of layouts, `pytest -m slow` the others.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import JobRunner, SyntheticLoader, small_job, written
from rank_pool import RankPool

from raytrain3d.checkpoint.identity import check_same_run
from raytrain3d.checkpoint.layout import KINDS, Piece
from raytrain3d.checkpoint.manifest import DTYPES, Receipt
from raytrain3d.checkpoint.snapshot import HostMemory
from raytrain3d.checkpoint.store import commit, read_into, read_manifest, step_directory, write_shard
from raytrain3d.config import JobConfig
from raytrain3d.model.transformer import build_layers
from raytrain3d.plan.params import model_spec
from raytrain3d.plan.plan import Plan, make_plan
from raytrain3d.train.holding import Holding
from raytrain3d.train.report import StepReport
from raytrain3d.train.trainer import Trainer

NUM_PAIRS = 60
GARBAGE = -77.0
Layout = dict[str, dict[str, Any]]
Truth = dict[tuple[str, str], torch.Tensor]


def random_layout(draw: random.Random, num_layers: int) -> Layout:
    """Any valid mesh of at most 8 ranks, schedule, partition and sharding."""
    while True:
        data, pipeline, tensor = draw.randint(1, 4), draw.randint(1, 4), draw.choice((1, 2, 4))
        schedule = draw.choice(("gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_v"))
        chunks = draw.choice((2, 3)) if schedule in ("interleaved", "breadth_first") else 2 if schedule == "zb_v" else 1
        if data * pipeline * tensor <= 8 and pipeline * chunks <= num_layers:
            break
    cuts = sorted(draw.sample(range(1, num_layers), pipeline * chunks - 1))
    counts = tuple(end - start for start, end in zip([0, *cuts], [*cuts, num_layers], strict=True))
    return {"mesh": {"data": data, "pipeline": pipeline, "tensor": tensor},
            "pipeline": {"schedule": schedule, "chunks": chunks, "layers": counts},
            "train": random_sharding(draw, data)}


def random_sharding(draw: random.Random, data: int) -> dict[str, Any]:
    """Any level, in shard groups of any size."""
    group = draw.choice([None, *(size for size in range(1, data) if data % size == 0)])
    return {"sharding": draw.choice(("none", "optimizer", "gradients", "full")), "shard_group": group}


def random_model(draw: random.Random) -> dict[str, Any]:
    """Tied or not, with a vocabulary that is padded on some ranks, and fewer key/value heads than some meshes divide."""
    shape = {"blocks": 6, "vocabulary": draw.choice((37, 64, 101)), "hidden": 16, "heads": 4, "feed_forward": 24,
             "vocabulary_multiple": draw.choice((1, 8)), "tied_embeddings": draw.random() < 0.5}
    if draw.random() < 0.3:
        return {**shape, "family": "gpt2", "kv_heads": 4, "freeze": ("blocks.2",)}
    return {**shape, "kv_heads": draw.choice((1, 2, 4)), "qk_norm": draw.random() < 0.5, "qkv_bias": draw.random() < 0.5}


def random_pair(seed: int) -> tuple[JobConfig, JobConfig]:
    draw = random.Random(seed)
    model, dtype = random_model(draw), draw.choice(("fp32", "bf16", "fp64"))
    jobs = []
    for _ in range(2):
        layout = random_layout(draw, num_layers=8)
        jobs.append(small_job(model=model, mesh=layout["mesh"], pipeline=layout["pipeline"],
                              train={**layout["train"], "dtype": dtype}))
    return jobs[0], jobs[1]


def holdings(config: JobConfig) -> list[Holding]:
    """What every rank of the job holds, in rank order."""
    plan = make_plan(config)
    spec = model_spec(config.model, config.train, plan.mesh.tensor)
    return [Holding(config, spec, plan, plan.mesh.coordinate(rank), torch.device("cpu"), build_layers)
            for rank in range(plan.mesh.size)]


def random_truth(config: JobConfig, seed: int) -> Truth:
    """Random values of every (parameter, kind) in the global, unpadded shape."""
    generator = torch.Generator().manual_seed(seed)
    return {(f"{state.spec.name}.{param.name}", kind): torch.randn(param.shape, generator=generator).to(buffer.dtype)
            for state in whole_states(config) for param in state.spec.params for kind, buffer, _ in state._buffers()}


def whole_states(config: JobConfig) -> list[Any]:
    (whole,) = holdings(small_job(model=_model_of(config), train={"dtype": config.train.dtype}))
    return list(whole.states.values())


def _model_of(config: JobConfig) -> dict[str, Any]:
    return {name: getattr(config.model, name) for name in config.model.__slots__}


def pieces_of(holding: Holding) -> list[Piece]:
    return [piece for state in holding.states.values() for piece in state.pieces()]


def part(truth: Truth, piece: Piece) -> torch.Tensor:
    box = piece.rectangle
    return truth[piece.name, piece.kind][tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))]


def save_all(config: JobConfig, truth: Truth, directory: str) -> list[Receipt]:
    """Every rank's shard, through one host memory as a rank that saves again and again has it."""
    memory, receipts = HostMemory(), []
    for rank, holding in enumerate(holdings(config)):
        for piece in pieces_of(holding):
            piece.tensor.copy_(part(truth, piece))
        pieces = [piece for state in holding.states.values() if holding.speaks_for(state) for piece in state.saved_pieces()]
        receipts.append(write_shard(directory, rank, memory.copy(pieces), step=5))
    return receipts


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] if seed % 6 else [])
                                  for seed in range(NUM_PAIRS)])
def test_any_layout_loads_what_any_layout_saved(seed: int, tmp_path: Path) -> None:
    before, after = random_pair(seed)
    truth, directory = random_truth(before, seed), step_directory(str(tmp_path), 5)
    receipts = save_all(before, truth, directory)
    commit(directory, 5, receipts, config=before)
    saved = sum(entry.num_bytes for receipt in receipts for entry in receipt.entries)
    assert saved == sum(values.nbytes for values in truth.values()), "every byte once"
    for holding in holdings(after):
        pieces = pieces_of(holding)
        for piece in pieces:
            piece.tensor.fill_(GARBAGE)
        read_into(directory, pieces)
        for piece in pieces:
            assert torch.equal(piece.tensor, part(truth, piece)), f"{piece.kind} of {piece.name} at {piece.rectangle}"


@pytest.mark.parametrize("before", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("after", ["fp32", "bf16", "fp64"])
def test_any_dtype_loads_the_most_exact_values_of_any_other(before: str, after: str, tmp_path: Path) -> None:
    draw = random.Random(f"{before} {after}")
    old, new = (small_job(model={"blocks": 6, "hidden": 16, "tied_embeddings": True}, mesh=layout["mesh"],
                          pipeline=layout["pipeline"], train={**layout["train"], "dtype": dtype})
                for dtype in (before, after) for layout in [random_layout(draw, num_layers=8)])
    truth, directory = random_truth(old, 3), step_directory(str(tmp_path), 5)
    commit(directory, 5, save_all(old, truth, directory), config=old)
    check_same_run(read_manifest(directory), directory, new)
    exact = {name: truth.get((name, "master"), truth[name, "weight"]) for name, _ in truth}
    for holding in holdings(new):
        read_into(directory, pieces := pieces_of(holding))
        for piece in pieces:
            is_value = piece.kind in ("weight", "master") and before != after
            source = exact[piece.name] if is_value else truth[piece.name, piece.kind]
            wanted = part({(piece.name, piece.kind): source}, piece).to(piece.tensor.dtype)
            assert torch.equal(piece.tensor, wanted), f"{piece.kind} of {piece.name}"


def test_the_pairs_have_every_trait() -> None:
    """Else the test above would say less than it seems to."""
    jobs = [job for seed in range(NUM_PAIRS) for job in random_pair(seed)]
    assert {job.mesh.data for job in jobs} == {1, 2, 3, 4}
    assert {job.train.sharding for job in jobs} == {"none", "optimizer", "gradients", "full"}
    assert {job.shard_group for job in jobs} == {1, 2, 3, 4}
    assert any(1 < job.shard_group < job.mesh.data for job in jobs), "shard groups of some replicas"
    assert {job.model.tied_embeddings for job in jobs} == {True, False}
    assert len({job.pipeline.schedule for job in jobs}) == 6
    assert {job.train.dtype for job in jobs} == {"fp32", "bf16", "fp64"}
    assert any(job.mesh.tensor > job.model.num_kv_heads for job in jobs), "replicated key/value heads"
    assert any(job.model.vocabulary % (job.mesh.tensor * job.model.vocabulary_multiple) for job in jobs), "padding"
    assert max(job.mesh.data * job.mesh.pipeline * job.mesh.tensor for job in jobs) == 8


@pytest.mark.parametrize("sharding", ["none", "optimizer", "gradients", "full"])
def test_replicas_divide_the_writing(sharding: str, tmp_path: Path) -> None:
    config = small_job(mesh={"data": 4}, train={"sharding": sharding, "dtype": "bf16"},
                       model={"hidden": 64, "feed_forward": 256})
    receipts = save_all(config, random_truth(config, 1), step_directory(str(tmp_path), 5))
    sizes = [sum(entry.num_bytes for entry in receipt.entries) for receipt in receipts]
    assert max(sizes) < 1.2 * sum(sizes) / 4, sizes


def test_host_memory_is_used_again() -> None:
    memory = HostMemory()
    state = whole_states(small_job())[1]
    first = memory.copy(state.pieces())
    state.weights.fill_(3.0)
    assert not any(bool((piece.tensor == 3.0).any()) for piece in first), "a snapshot keeps its values"
    second = memory.copy(state.pieces())
    assert [piece.tensor.data_ptr() for piece in first] == [piece.tensor.data_ptr() for piece in second]
    assert all(torch.equal(piece.tensor, live.tensor) for piece, live in zip(second, state.pieces(), strict=True))
    memory.copy(state.pieces()[:1])
    assert {kind for kind, _, _ in state._buffers()} <= set(KINDS) and memory._block.nbytes >= DTYPES["float64"]


# With real training

@pytest.fixture(scope="session")
def run_job(pool: RankPool) -> JobRunner:
    return JobRunner(pool)


def half_run(config: JobConfig, plan: Plan, rank: int, port: int, generation: int, directory: str,
             resumes: bool) -> tuple[list[StepReport], Receipt | None]:
    """Steps 1-5 and a save, or a load and steps 6-10."""
    trainer = Trainer(config, plan, rank, loader=SyntheticLoader(config, plan, plan.mesh.coordinate(rank).data))  # type: ignore[arg-type]
    try:
        trainer.connect("127.0.0.1", port, generation)
        if resumes:
            trainer.load(directory)
            return [trainer.step(n) for n in range(6, 11)], None
        trainer.initialize()
        return [trainer.step(n) for n in range(1, 6)], written(trainer, directory, 5)
    finally:
        trainer.close()


CHANGES: list[tuple[Layout, Layout]] = [
    ({"mesh": {"data": 2, "pipeline": 2}, "pipeline": {"schedule": "zb_v"}, "train": {"sharding": "full"}},
     {"mesh": {"tensor": 4}}),
    ({"mesh": {"data": 4, "tensor": 2}, "train": {"sharding": "optimizer"}},
     {"mesh": {"pipeline": 3}, "pipeline": {"schedule": "zb_h1", "layers": (1, 1, 3)}}),
    ({"mesh": {"pipeline": 2, "tensor": 2}, "pipeline": {"schedule": "interleaved"}},
     {"mesh": {"data": 3, "pipeline": 2}, "train": {"sharding": "optimizer"}}),
    ({"mesh": {"data": 3}}, {"mesh": {"data": 2, "tensor": 2}, "train": {"sharding": "optimizer"}}),
    ({"mesh": {"data": 3, "pipeline": 2}, "train": {"sharding": "gradients"}},
     {"mesh": {"data": 4, "tensor": 2}, "train": {"sharding": "full", "shard_group": 2}}),
]


@pytest.mark.dist
@pytest.mark.parametrize(("before", "after"), [pytest.param(*change, marks=[pytest.mark.slow] if number > 0 else [])
                                               for number, change in enumerate(CHANGES)])
def test_training_goes_on_under_another_layout(before: Layout, after: Layout, run_job: JobRunner, tmp_path: Path) -> None:
    def job(layout: Layout) -> JobConfig:
        return small_job(model={"tied_embeddings": "pipeline" not in after["mesh"], "kv_heads": 2},
                         **{**layout, "train": {"dtype": "fp32", **layout.get("train", {})}})
    directory = step_directory(str(tmp_path), 5)
    first = run_job.call(half_run, job(before), directory, False)
    commit(directory, 5, [receipt for _, receipt in first], config=job(before))
    assert read_manifest(directory).step == 5
    late = run_job.call(half_run, job(after), directory, True)[0][0]
    unbroken = run_job(job(after), 10)[0][0][5:]
    for report, expected in zip(late, unbroken, strict=True):
        assert report.loss == pytest.approx(expected.loss, rel=1e-5)
        assert report.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-5)
