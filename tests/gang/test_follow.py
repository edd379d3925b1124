"""Following a job whose connections drop: every character once, until it has ended."""

from collections.abc import AsyncIterator, Sequence

import pytest

from raytrain3d.gang.follow import JobState, Unreachable, follow

RUNNING, LOST = JobState(status="RUNNING"), Unreachable("no answer")


class Job:
    """Answers as told, one after another; the last answer stays. A stream is as much of `text` as it says, and may break."""

    def __init__(self, text: str, states: Sequence[JobState | Unreachable], streams: Sequence[tuple[int, bool]]) -> None:
        self._text, self._states, self._streams = text, list(states), list(streams)

    def state(self) -> JobState:
        state = self._states.pop(0) if len(self._states) > 1 else self._states[0]
        if isinstance(state, Unreachable):
            raise state
        return state

    async def output(self) -> AsyncIterator[str]:
        length, breaks = self._streams.pop(0) if len(self._streams) > 1 else self._streams[0]
        for start in range(0, length, 7):
            yield self._text[start:min(start + 7, length)]
        if breaks:
            raise LOST


TEXT = "".join(f"step {n}\n" for n in range(20))


@pytest.mark.parametrize("streams", [
    [(len(TEXT), False)], [(0, True), (30, True), (12, True), (len(TEXT), False)], [(50, False), (len(TEXT), False)]])
def test_every_character_is_written_once(streams: list[tuple[int, bool]]) -> None:
    written: list[str] = []
    job = Job(TEXT, [RUNNING, RUNNING, LOST, RUNNING, JobState(status="SUCCEEDED", exit_code=0)], streams)
    assert follow(job, written.append, retry_s=0).code == 0
    assert "".join(written) == TEXT


@pytest.mark.parametrize(("state", "code"), [
    (JobState(status="FAILED", exit_code=7), 7), (JobState(status="FAILED", exit_code=-9), -9),
    (JobState(status="FAILED"), 1),
    (JobState(status="STOPPED"), 143), (JobState(status="SUCCEEDED", exit_code=0), 0)])
def test_the_code_is_the_drivers_own(state: JobState, code: int) -> None:
    assert follow(Job("", [RUNNING, state], [(0, False)]), lambda text: None, retry_s=0).code == code


def test_a_cluster_that_stays_away_is_given_up() -> None:
    with pytest.raises(Unreachable, match="no answer"):
        follow(Job("", [RUNNING, LOST], [(0, True)]), lambda text: None, limit_s=0.05, retry_s=0.01)
