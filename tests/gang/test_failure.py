"""Who caused a failure, and what the message says."""

from dataclasses import replace

import pytest

from raytrain3d.config import DataConfig, JobConfig, MeshConfig, ModelConfig, PipelineConfig, RunConfig, TrainConfig
from raytrain3d.errors import DataError, RankFailed
from raytrain3d.gang.failure import Sign, culprit, diagnose, exit_cause, is_connection_error, raised
from raytrain3d.plan.grid import program_grid
from raytrain3d.plan.plan import make_plan
from raytrain3d.plan.program import programs_for
from raytrain3d.plan.schedule import Kind, Op

JOB = JobConfig(run=RunConfig(name="job"), data=DataConfig(path="data"), mesh=MeshConfig(data=2, pipeline=2),
                model=ModelConfig(vocabulary=257, hidden=8, blocks=2, heads=2, feed_forward=16),
                train=TrainConfig(steps=9, global_batch=6, sequence=16), pipeline=PipelineConfig(schedule="1f1b"))
PLAN = make_plan(JOB)
NODES = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
LOST = raised(0, "RuntimeError", "[gloo/transport/tcp/pair.cc:5] Connection closed by peer", step=7, op="0F1",
              during=None, traceback="...")
RAISED = raised(1, "MemoryError", "no room", step=7, op="1B2", during=None, traceback="Traceback: in backward")
DIED = Sign(rank=3, kind="died", cause=exit_cause(-9), step=7)


def test_a_death_beats_an_error_which_beats_lost_connections() -> None:
    assert culprit([LOST, RAISED, DIED]) == DIED
    assert culprit([LOST, RAISED]) is RAISED
    other = Sign(rank=2, kind="lost connection", cause="reset")
    assert culprit([other, LOST]) is other


def test_a_death_is_named_with_rank_stage_node_and_cause() -> None:
    error = diagnose([LOST, DIED], PLAN, NODES)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.step) == (3, 7)
    first, second = str(error).splitlines()
    assert first.startswith("rank 3 (replica 1, stage 1, tensor 0) on node n1 died in step 7: ")
    assert "SIGKILL" in first
    assert second == "because of that rank 0 failed too"


def test_an_error_is_named_with_its_op_and_traceback() -> None:
    error = diagnose([LOST, RAISED], PLAN, NODES)
    assert isinstance(error, RankFailed) and error.op == "1B2"
    where = "rank 1 (replica 0, stage 1, tensor 0) on node n0"
    assert f"{where} failed in step 7, op 1B2: MemoryError: no room" in str(error)
    assert "in backward" in str(error)


def test_the_failed_op_is_marked_in_its_schedule() -> None:
    text = str(diagnose([LOST, RAISED], PLAN, NODES))
    grid = program_grid(programs_for("1f1b", 2, 3), 1, Op(Kind.BACKWARD, 1, 2))
    assert ">1B2<" in grid.splitlines()[1]
    assert text.endswith(f"\nschedule 1f1b of replica 0 by pipeline rank, the failed op marked:\n{grid}")
    assert ">0F1<" in str(diagnose([LOST], PLAN, NODES))


@pytest.mark.parametrize("change", [{"op": None}, {"op": "1F9"}, {"during": "evaluating"}])
def test_no_schedule_without_a_failed_op_of_a_step(change: dict[str, str | None]) -> None:
    assert "schedule" not in str(diagnose([replace(RAISED, **change)], PLAN, NODES))


def test_all_stages_of_a_rank_are_named() -> None:
    plan = make_plan(replace(JOB, pipeline=PipelineConfig(schedule="zb_v")))
    sign = Sign(rank=2, kind="raised", cause="no room", op="3W2")
    text = str(diagnose([sign], plan, {}))
    assert text.startswith("rank 2 (replica 1, stages 0, 3, tensor 0) failed, op 3W2: no room")
    assert ">3W2<" in text.splitlines()[-2]


def test_neighbours_know_in_which_step_a_rank_died() -> None:
    assert culprit([Sign(rank=3, kind="died", cause="x", step=4), LOST]).step == 7


def test_two_deaths_are_both_named() -> None:
    text = str(diagnose([DIED, Sign(rank=2, kind="died", cause="x")], PLAN, NODES))
    assert "so did rank 2 (replica 1, stage 0, tensor 0) on node n1" in text


def test_an_error_that_a_user_can_mend_keeps_its_class() -> None:
    sign = raised(2, "DataError", "train-0.arrow is corrupt", step=None, op=None, during="probing", traceback="T")
    error = diagnose([sign], PLAN, NODES)
    assert isinstance(error, DataError)
    assert str(error) == "train-0.arrow is corrupt (seen by rank 2 (replica 1, stage 0, tensor 0) on node n1)"


@pytest.mark.parametrize(("kind", "message", "lost"), [
    ("RuntimeError", "Connection reset by peer", True), ("DistBackendError", "", True),
    ("RuntimeError", "Timed out waiting 600ms for recv operation to complete", True),
    ("RuntimeError", "shape mismatch", False), ("MemoryError", "", False)])
def test_what_counts_as_a_lost_connection(kind: str, message: str, lost: bool) -> None:
    assert is_connection_error(kind, message) == lost


def test_exit_codes_in_words() -> None:
    assert exit_cause(3) == "its process ended with exit code 3"
    assert exit_cause(-11) == "its process was ended by SIGSEGV"
