"""Which step all go on from after ranks were lost, who fills whom, and when a run has had enough."""

import itertools

import pytest

from raytrain3d.config import RecoveryConfig
from raytrain3d.errors import ConfigError
from raytrain3d.gang.budget import Budget
from raytrain3d.gang.recovery import GoBack, GoOn, Rewind, decide
from raytrain3d.plan.mesh import Mesh
from raytrain3d.plan.peers import peers_of
from raytrain3d.train.standing import Standing

MESH = Mesh(data=2, pipeline=2, tensor=1)


def at(held: int | None, agreed: int | None = None) -> Standing:
    """Holds one step, and has got the commit vector of one."""
    return Standing(held=held, agreed=None if agreed is None else (agreed, (float(agreed),)))


def test_the_step_is_done_again_when_nobody_got_its_vector() -> None:
    decision = decide({0: at(7, 7), 1: at(7, 7), 2: at(7, 7)}, MESH, shards=1)
    assert decision == GoOn(step=7, values=(7.0,), forward=(), fills=((3, 1),))


def test_everyone_goes_forward_when_anyone_got_the_vector() -> None:
    decision = decide({0: at(7, 8), 1: at(7, 7), 3: at(8, 8)}, MESH, shards=1)
    assert decision == GoOn(step=8, values=(8.0,), forward=(0, 1), fills=((2, 0),))


def test_a_vector_known_only_to_the_dead_is_as_if_it_had_not_been() -> None:
    decision = decide({1: at(7, 7), 2: at(7, 7), 3: at(7, 7)}, MESH, shards=1)
    assert isinstance(decision, GoOn) and decision.step == 7 and decision.forward == ()


def test_ranks_that_were_being_filled_are_filled_again() -> None:
    decision = decide({0: at(7, 7), 1: at(7, 7), 2: Standing(), 3: at(7, 7)}, MESH, shards=1)
    assert isinstance(decision, GoOn) and decision.fills == ((2, 0),)


def test_before_the_first_step_there_is_no_vector() -> None:
    assert decide({0: at(0), 1: at(0), 2: at(0)}, MESH, shards=1) == GoOn(step=0, values=None, forward=(), fills=((3, 1),))


def test_a_network_that_broke_loses_nobody() -> None:
    assert decide({rank: at(4, 4) for rank in range(4)}, MESH, shards=2) == GoOn(step=4, values=(4.0,), forward=(), fills=())


@pytest.mark.parametrize(("left", "mesh", "shards", "words"), [
    ((0, 2), MESH, 1, "nobody else holds what ranks 1, 3 held"),
    ((0, 1, 2), MESH, 2, "nobody else holds what rank 3 held"),
    ((0,), Mesh(pipeline=2), 1, "nobody else holds what rank 1 held"),
    ((), MESH, 1, "no rank is left"),
])
def test_a_state_that_nobody_holds_comes_from_a_checkpoint(left: tuple[int, ...], mesh: Mesh, shards: int,
                                                           words: str) -> None:
    decision = decide({rank: at(7, 7) for rank in left}, mesh, shards=shards)
    assert isinstance(decision, GoBack) and words in decision.reason


@pytest.mark.parametrize("standings", [{0: at(5, 5), 1: at(7, 7), 2: at(7, 7)}, {0: at(6, 6), 1: at(7), 2: at(7)}])
def test_ranks_that_cannot_be_brought_together_go_back(standings: dict[int, Standing]) -> None:
    decision = decide(standings, MESH, shards=1)
    assert isinstance(decision, GoBack) and "stand at steps" in decision.reason


def test_the_nearest_rank_with_the_same_shard_fills() -> None:
    mesh = Mesh(data=4, pipeline=1, tensor=2)
    everyone = {rank: at(3, 3) for rank in range(8)}
    lost = {rank: standing for rank, standing in everyone.items() if rank not in (4, 5)}
    whole, halves = decide(lost, mesh, shards=1), decide(lost, mesh, shards=2)
    assert isinstance(whole, GoOn) and whole.fills == ((4, 2), (5, 3))
    assert isinstance(halves, GoOn) and halves.fills == ((4, 0), (5, 1))


def test_no_split_of_survivors_leaves_ranks_at_different_steps() -> None:
    """Any ranks lost, any of the others with the vector: who stays behind is always carried forward."""
    for lost, ahead, got in itertools.product(range(16), repeat=3):
        standings = {rank: at(8, 8) if ahead >> rank & 1 else at(7, 8 if got >> rank & 1 else 7)
                     for rank in range(4) if not lost >> rank & 1}
        decision = decide(standings, MESH, shards=1)
        if isinstance(decision, GoBack):
            assert {0, 2} <= {r for r in range(4) if lost >> r & 1} or {1, 3} <= {r for r in range(4) if lost >> r & 1}
            continue
        anyone = any((ahead | got) >> rank & 1 for rank in standings)
        assert decision.step == (8 if anyone else 7)
        assert {rank for rank, standing in standings.items() if standing.held != decision.step} == set(decision.forward)
        assert {rank for rank, _ in decision.fills} == set(range(4)) - set(standings)


SPLIT = ((0, 2), (2, 4))


def kept(held: int, own: tuple[int, ...], client: tuple[int, ...]) -> Standing:
    """Holds a step, and has these snapshots of its own and of its client's state."""
    return Standing(held=held, own=dict.fromkeys(own, SPLIT), client=frozenset(client))


def test_a_state_that_nobody_holds_comes_from_the_newest_whole_snapshot() -> None:
    peers = (1, 2, 3, 0)
    left = {0: kept(17, (10, 15), (10, 15)), 1: kept(17, (10, 15), (10, 15)), 2: kept(17, (10, 15), (10,))}
    decision = decide(left, MESH, shards=2, peers=peers)
    assert decision == Rewind(step=15, stages=SPLIT, fills=((3, 0),), reason="nobody else holds what rank 3 held")
    left[0] = kept(17, (10, 15), (10,))
    decision = decide(left, MESH, shards=2, peers=peers)
    assert isinstance(decision, Rewind) and decision.step == 10, "what rank 0 keeps of step 15 had not arrived"


def test_a_snapshot_needs_its_keeper_and_be_newer_than_the_checkpoint() -> None:
    whole = {rank: kept(17, (15,), (15,)) for rank in range(4)}
    both = {rank: whole[rank] for rank in (1, 2)}
    assert isinstance(decide(both, MESH, shards=2, peers=(1, 2, 3, 0)), GoBack), "rank 0 kept that of rank 3"
    assert isinstance(decide(both, MESH, shards=2, peers=(2, 3, 0, 1)), Rewind)
    assert isinstance(decide(both, MESH, shards=2, peers=(2, 3, 0, 1), saved=16), GoBack)


def test_a_live_replica_is_better_than_a_snapshot() -> None:
    left = {rank: kept(17, (15,), (15,)) for rank in (0, 1, 2)}
    assert isinstance(decide(left, MESH, shards=1, peers=(1, 2, 3, 0)), GoOn)


@pytest.mark.parametrize(("nodes", "neighbour", "peers"), [
    ("aaaa", 2, (2, 3, 0, 1)), ("aabb", 1, (2, 3, 0, 1)), ("abab", 1, (1, 0, 3, 2)), ("aabbcc", 1, (2, 3, 4, 5, 0, 1))])
def test_peers_are_on_another_node(nodes: str, neighbour: int, peers: tuple[int, ...]) -> None:
    assert peers_of(list(nodes), neighbour) == peers
    assert len(set(nodes)) == 1 or all(nodes[rank] != nodes[peer] for rank, peer in enumerate(peers))


@pytest.mark.parametrize("nodes", ["aaab", "aaaabb", "abcdefg", "aabbb", "abbbccd"])
def test_every_rank_keeps_one_copy(nodes: str) -> None:
    peers = peers_of(list(nodes), 1)
    assert sorted(peers) == list(range(len(nodes))) and all(rank != peer for rank, peer in enumerate(peers))


def test_a_budget_counts_each_cause_within_its_window() -> None:
    budget = Budget(RecoveryConfig(deaths=2, errors=0, window_s=100))
    assert budget.spend("deaths", 1, 0.0) is None
    assert budget.spend("deaths", 2, 50.0) is None
    assert budget.spend("deaths", 3, 99.0) == ("recovery.deaths is 2: 3 failures of this kind within 100 s end the run")
    assert budget.spend("deaths", 4, 300.0) is None
    assert "recovery.errors is 0: 1 failure of this kind" in str(budget.spend("errors", 4, 300.0))


def test_waits_grow_while_no_step_is_done() -> None:
    budget = Budget(RecoveryConfig(backoff_s=1.5))
    waits = []
    for step in (7, 7, 7, 7, 8, 8):
        budget.spend("deaths", step, 0.0)
        waits.append(budget.wait_s)
    assert waits == [0.0, 1.5, 3.0, 6.0, 0.0, 1.5]


@pytest.mark.parametrize(("keys", "words"), [
    ({"deaths": -1}, r"recovery\.deaths is -1: must be at least 0"), ({"errors": -1}, r"recovery\.errors is -1"),
    ({"window_s": 0}, r"recovery\.window_s is 0: must be above 0"), ({"backoff_s": -1}, r"recovery\.backoff_s is -1")])
def test_bad_keys_are_named(keys: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RecoveryConfig(**keys)  # type: ignore[arg-type]
