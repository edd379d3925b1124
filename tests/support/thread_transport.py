"""A pipeline in one process: every rank is a thread, and its channels obey the rules of NCCL.

A channel has no tags: the oldest send meets the oldest receive, whatever they are for. Operations never overtake each
other, a send ends only when a posted receive has taken it, and a rank posts few receives ahead, in the order of its
program. Sends never hold up the compute that follows; a rank waits for them at its end.

Instead of tensors travel the stages that a value has been through, so that a wrong message shows.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Lock

from raytrain3d.plan.program import RECEIVES, SENDS, Channel, Programs, receive_of
from raytrain3d.plan.rank_program import channels_of, rank_program
from raytrain3d.plan.schedule import Kind, Op

Trail = tuple[int, ...]
"""Stages that computed a value, in order: down the pipeline, then up."""
Message = tuple[Op, Trail]
"""The send, and what it sends."""
POSTED_AHEAD = 2


class WrongMessage(Exception):
    """A receive was met by a send that is not its own."""


class Hang(Exception):
    """Ranks were still waiting at the end of the time limit."""


class Wire:
    """One channel. What was issued first on either end is matched first."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._sends: deque[tuple[Message, Future[None]]] = deque()
        self._receives: deque[Future[Message]] = deque()
        self._is_cut = False

    def send(self, message: Message) -> "Future[None]":
        """Done when a receive has taken the message."""
        work: Future[None] = Future()
        with self._lock:
            self._sends.append((message, work))
            self._match()
        return work

    def receive(self) -> "Future[Message]":
        """Done when a message has come."""
        work: Future[Message] = Future()
        with self._lock:
            self._receives.append(work)
            self._match()
        return work

    def cut(self) -> None:
        """End everything that waits or will wait with CancelledError."""
        with self._lock:
            self._is_cut = True
            self._match()

    def _match(self) -> None:
        while self._is_cut and (self._sends or self._receives):
            (self._sends.pop()[1] if self._sends else self._receives.pop()).cancel()
        while self._sends and self._receives:
            message, sent = self._sends.popleft()
            self._receives.popleft().set_result(message)
            sent.set_result(None)


class Inbox:
    """The receives of one channel in the order of the program, at most POSTED_AHEAD of them posted."""

    def __init__(self, wire: Wire, ops: Iterable[Op]) -> None:
        self._wire, self._coming = wire, deque(ops)
        self._posted: deque[tuple[Op, Future[Message]]] = deque()
        for _ in range(POSTED_AHEAD):
            self._post()

    def _post(self) -> None:
        if self._coming:
            self._posted.append((self._coming.popleft(), self._wire.receive()))

    def take(self, op: Op, timeout_s: float) -> Trail:
        """Wait for the message of `op`, which is the next in the program."""
        expected, work = self._posted.popleft()
        assert expected == op
        send, trail = work.result(timeout_s)
        if receive_of(send) != op:
            raise WrongMessage(f"{op} was met by {send}")
        self._post()
        return trail


@dataclass
class Rank:
    """One thread. `seconds` is called once for each compute op, which then takes as long as it says."""

    programs: Programs
    rank: int
    wires: dict[Channel, Wire]
    seconds: Callable[[Op], float]
    deadline: float
    current: Op | None = None
    inputs: dict[tuple[bool, int, int], Trail] = field(default_factory=dict)
    """(forward, stage, micro-batch) -> what came for that stage."""
    outputs: dict[Op, Trail] = field(default_factory=dict)
    """By the send that will take it."""
    finished: dict[int, Trail] = field(default_factory=dict)
    """Micro-batch -> input gradient of the first stage."""

    def run(self) -> None:
        """Execute the program; TimeoutError after the deadline, CancelledError if another rank failed."""
        program = rank_program(self.programs, self.rank)
        inboxes = {channel: Inbox(self.wires[channel], ops) for channel, ops in program.arrivals.items()}
        sent = []
        for self.current in program.ops:
            op = self.current
            if op.kind in SENDS:
                sent.append(self.wires[program.channels[op]].send((op, self.outputs.pop(op))))
            elif op.kind in RECEIVES:
                trail = inboxes[program.channels[op]].take(op, self._time_left())
                self.inputs[op.kind is Kind.RECEIVE_FORWARD, op.stage, op.micro_batch] = trail
            else:
                time.sleep(self.seconds(op))
                self._compute(op)
        for work in sent:
            work.result(self._time_left())

    def _time_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    def _compute(self, op: Op) -> None:
        last = self.programs.schedule.num_stages - 1
        match op.kind:
            case Kind.FORWARD:
                trail = (*(self.inputs.pop((True, op.stage, op.micro_batch)) if op.stage else ()), op.stage)
                if op.stage == last:
                    self.inputs[False, last, op.micro_batch] = trail
                else:
                    self._pass_on(op, Kind.SEND_FORWARD, op.stage + 1, trail)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                trail = (*self.inputs.pop((False, op.stage, op.micro_batch)), op.stage)
                if op.stage == 0:
                    self.finished[op.micro_batch] = trail
                else:
                    self._pass_on(op, Kind.SEND_BACKWARD, op.stage - 1, trail)

    def _pass_on(self, op: Op, send: Kind, stage: int, trail: Trail) -> None:
        if self.programs.schedule.rank_of(stage) == self.rank:
            self.inputs[send is Kind.SEND_FORWARD, stage, op.micro_batch] = trail
        else:
            self.outputs[Op(send, op.stage, op.micro_batch)] = trail


def run_on_threads(programs: Programs, seconds: Callable[[Op], float], *, limit_s: float) -> dict[int, Trail]:
    """Run all programs. Returns what each micro-batch went through when its gradient leaves the first stage.

    WrongMessage names a receive and the send it met; Hang names where the ranks stand after `limit_s` seconds.
    """
    wires = {channel: Wire() for channel in channels_of(programs.schedule.placement)}
    ranks = [Rank(programs, rank, wires, seconds, time.monotonic() + limit_s) for rank in range(len(programs.ops))]
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(rank.run) for rank in ranks]
        wait(futures, return_when=FIRST_EXCEPTION)
        for wire in wires.values():
            wire.cut()
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, TimeoutError | CancelledError):
            raise error
    waiting = [f"rank {rank.rank} at {rank.current}" for rank, error in zip(ranks, errors, strict=True) if error]
    if waiting:
        raise Hang(", ".join(waiting))
    return {micro_batch: trail for rank in ranks for micro_batch, trail in rank.finished.items()}
