"""From what is known after something went wrong to the one rank that caused it, and a message that says so.

When a rank dies, its neighbours fail too: they lose their connection to it. So a dead process beats a rank with an
error of its own, which beats ranks that only lost a connection; among equals the first one seen.
"""

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from raytrain3d.errors import CheckpointError, ConfigError, DataError, PlanError, RankFailed, RayTrain3DError
from raytrain3d.plan.grid import program_grid
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.program import programs_for

Kind = Literal["died", "raised", "hung", "lost connection", "silent"]
ORDER: tuple[Kind, ...] = ("died", "raised", "hung", "lost connection", "silent")

_WHAT: dict[Kind, str] = {"died": "died", "raised": "failed", "hung": "hung", "lost connection": "lost its connections",
                          "silent": "did not answer"}
_USER_ERRORS: dict[str, type[RayTrain3DError]] = {
    error.__name__: error for error in (ConfigError, DataError, CheckpointError, PlanError)}
_CONNECTION_KINDS = frozenset({"ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError",
                               "DistNetworkError", "DistStoreError", "DistBackendError"})
_CONNECTION_WORDS = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe",
                     "socket closed", "gloo/transport", "timed out waiting", "ncclremoteerror", "ncclsystemerror",
                     "communicator was aborted", "connectfullmesh", "socket timeout", "wait timeout")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sign:
    """One rank's part in a failure."""

    rank: int
    kind: Kind
    cause: str
    step: int | None = None
    """The step that it was in, as far as is known."""
    op: str | None = None
    during: str | None = None
    """What it was doing, when not training."""
    error: str = ""
    """Class name of its exception, if it raised."""
    traceback: str = ""


def is_connection_error(kind: str, message: str) -> bool:
    """Whether an exception of this class name and text is what a rank sees when another one is gone."""
    text = message.lower()
    return kind in _CONNECTION_KINDS or any(word in text for word in _CONNECTION_WORDS)


def raised(rank: int, error: str, message: str, *, step: int | None, op: str | None, during: str | None,
           traceback: str) -> Sign:
    """The sign of a rank that raised an exception of class `error`."""
    lost = is_connection_error(error, message)
    return Sign(rank=rank, kind="lost connection" if lost else "raised", cause=message or error, error=error,
                step=step, op=op, during=during, traceback=traceback)


def exit_cause(code: int) -> str:
    """What an exit code of a process means; negative ones are signals."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = " (if nobody sent it, the node may be out of memory: see its kernel log)" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"


def culprit(signs: Sequence[Sign]) -> Sign:
    """The sign that explains the others. `signs` in the order they were seen, at least one.

    What is known of a dead rank's step may be a second old; its neighbours know in which step they missed it.
    """
    first = min(signs, key=lambda sign: ORDER.index(sign.kind))
    steps = [sign.step for sign in signs if sign.step is not None]
    return replace(first, step=max(steps)) if first.kind == "died" and first.during is None and steps else first


def is_loss(sign: Sign) -> bool:
    """Whether the rank has to be replaced: what it holds is gone, or cannot be trusted."""
    return sign.kind != "lost connection"


def diagnose(signs: Sequence[Sign], plan: Plan, nodes: Mapping[int, str]) -> RayTrain3DError:
    """One error that names rank, stage, node and cause, and shows the op that failed. nodes: rank -> node, where known.

    An error that tells the user what to change (data, checkpoint, configuration) keeps its class; all else is
    RankFailed.
    """
    first = culprit(signs)
    where = place(first.rank, plan, nodes)
    if first.error in _USER_ERRORS:
        return _USER_ERRORS[first.error](f"{first.cause} (seen by {where})")
    cause = f"{first.error}: {first.cause}" if first.error and first.error != first.cause else first.cause
    lines = [f"{where} {_WHAT[first.kind]}{_when(first)}: {cause}"]
    others = {sign.rank for sign in signs} - {first.rank}
    if alike := others & {sign.rank for sign in signs if sign.kind == first.kind}:
        lines.append(f"so did {'; '.join(place(rank, plan, nodes) for rank in sorted(alike))}")
    if touched := others - alike:
        lines.append(f"because of that {_numbered('rank', sorted(touched))} failed too")
    if first.traceback:
        lines.append(first.traceback.rstrip())
    lines += _schedule(first, plan)
    return RankFailed("\n".join(lines), rank=first.rank, step=first.step, op=first.op)


def place(rank: int, plan: Plan, nodes: Mapping[int, str]) -> str:
    """`rank 3 (replica 0, stage 1, tensor 1) on node 10.0.0.7`."""
    at = plan.mesh.coordinate(rank)
    node = f" on node {nodes[rank]}" if rank in nodes else ""
    return f"rank {rank} (replica {at.data}, {_numbered('stage', plan.stages_of(at.pipeline))}, tensor {at.tensor}){node}"


def _schedule(sign: Sign, plan: Plan) -> list[str]:
    """The replica's schedule with the op that failed marked, if it failed in one."""
    at = plan.mesh.coordinate(sign.rank)
    programs = programs_for(plan.schedule, plan.mesh.pipeline, plan.shares[at.data], plan.chunks)
    named = {str(op): op for op in programs.ops[at.pipeline]}
    if sign.op not in named or sign.during is not None:
        return []
    return [f"schedule {plan.schedule} of replica {at.data} by pipeline rank, the failed op marked:",
            program_grid(programs, at.pipeline, named[sign.op])]


def _when(sign: Sign) -> str:
    if sign.during is not None:
        return f" while {sign.during}"
    return (f" in step {sign.step}" if sign.step is not None else "") + (f", op {sign.op}" if sign.op else "")


def _numbered(word: str, numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 3, 5`."""
    return f"{word}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
