"""The errors a user can meet, each saying what is wrong and what would be right.

Every failure the system foresees is one of these. They carry where it happened (rank, step, op) as fields, so that
callers never parse messages.
"""


class RayTrain3DError(Exception):
    """Base of every error this package raises on purpose; `cli` prints its message without a traceback."""


class ConfigError(RayTrain3DError):
    """A configuration key has a value that cannot work. The message names the key path, the value and what is valid."""


class PlanError(RayTrain3DError):
    """The configuration is well formed but no layout can satisfy it (too many stages, memory, cluster size)."""


class DataError(RayTrain3DError):
    """Token data is missing, foreign, corrupt or does not fit the model. The message names the file."""


class CheckpointError(RayTrain3DError):
    """A checkpoint is missing, incomplete, corrupt or belongs to another run. The message names the file."""


class CapacityError(RayTrain3DError):
    """The cluster did not offer what the plan needs within the configured wait."""


class NumbersFailed(RayTrain3DError):
    """Loss or gradients were not finite in more steps than allowed. The message names the layers and ranks."""


class RankFailed(RayTrain3DError):
    """A rank died, raised or hung. `rank`, `step` and `op` say where, as far as it is known."""

    def __init__(self, message: str, *, rank: int, step: int | None = None, op: str | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.op = op

    def __reduce__(self) -> tuple[object, ...]:
        return (_rank_failed, (str(self), self.rank, self.step, self.op))


def _rank_failed(message: str, rank: int, step: int | None, op: str | None) -> RankFailed:
    return RankFailed(message, rank=rank, step=step, op=op)
