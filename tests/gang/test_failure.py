"""Who caused a failure, and what the message says."""

import pytest

from raytrain3d.errors import DataError, RankFailed
from raytrain3d.gang.failure import Sign, culprit, diagnose, exit_cause, is_connection_error, raised
from raytrain3d.plan.mesh import Mesh

MESH = Mesh(data=2, pipeline=2, tensor=1)
NODES = {0: "n0", 1: "n0", 2: "n1", 3: "n1"}
LOST = raised(0, "RuntimeError", "[gloo/transport/tcp/pair.cc:5] Connection closed by peer", step=7, op="0F1",
              during=None, traceback="...")
RAISED = raised(1, "MemoryError", "no room", step=7, op="0B2", during=None, traceback="Traceback: in backward")
DIED = Sign(rank=3, kind="died", cause=exit_cause(-9), step=7)


def test_a_death_beats_an_error_which_beats_lost_connections() -> None:
    assert culprit([LOST, RAISED, DIED]) == DIED
    assert culprit([LOST, RAISED]) is RAISED
    other = Sign(rank=2, kind="lost connection", cause="reset")
    assert culprit([other, LOST]) is other


def test_a_death_is_named_with_rank_stage_node_and_cause() -> None:
    error = diagnose([LOST, DIED], MESH, NODES)
    assert isinstance(error, RankFailed)
    assert (error.rank, error.step) == (3, 7)
    first, second = str(error).splitlines()
    assert first.startswith("rank 3 (replica 1, stage 1, tensor 0) on node n1 died in step 7: ")
    assert "SIGKILL" in first
    assert second == "because of that rank 0 failed too"


def test_an_error_is_named_with_its_op_and_traceback() -> None:
    error = diagnose([LOST, RAISED], MESH, NODES)
    assert isinstance(error, RankFailed) and error.op == "0B2"
    where = "rank 1 (replica 0, stage 1, tensor 0) on node n0"
    assert f"{where} failed in step 7, op 0B2: MemoryError: no room" in str(error)
    assert "in backward" in str(error)


def test_neighbours_know_in_which_step_a_rank_died() -> None:
    assert culprit([Sign(rank=3, kind="died", cause="x", step=4), LOST]).step == 7


def test_two_deaths_are_both_named() -> None:
    text = str(diagnose([DIED, Sign(rank=2, kind="died", cause="x")], MESH, NODES))
    assert "so did rank 2 (replica 1, stage 0, tensor 0) on node n1" in text


def test_an_error_that_a_user_can_mend_keeps_its_class() -> None:
    sign = raised(2, "DataError", "train-0.arrow is corrupt", step=None, op=None, during="probing", traceback="T")
    error = diagnose([sign], MESH, NODES)
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
