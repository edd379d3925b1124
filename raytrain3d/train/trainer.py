"""One rank: its layers, its groups, its step. Runs the same alone, in a plain process and inside a Ray actor.

A step computes and reduces gradients, agrees with all ranks, and only then changes parameters.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from raytrain3d.checkpoint.progress import SaveProgress, SaveStart
from raytrain3d.checkpoint.reader import Reader
from raytrain3d.checkpoint.snapshot import HostMemory
from raytrain3d.checkpoint.store import read_into
from raytrain3d.checkpoint.writer import SHARE_OF_CORE, ShardWriter
from raytrain3d.config import JobConfig
from raytrain3d.data.loader import Loader
from raytrain3d.data.micro_batch import MicroBatch
from raytrain3d.model.compiled import check_backend
from raytrain3d.model.functional import put_off
from raytrain3d.model.transformer import Layer, build_layers
from raytrain3d.parallel.channels import Buffers, Mail
from raytrain3d.parallel.clock import clock_for
from raytrain3d.parallel.commit import Agreement, CommitVector, sum_over_all
from raytrain3d.parallel.groups import Groups, Link, join_store
from raytrain3d.parallel.layer_state import DTYPES, LayerState
from raytrain3d.parallel.links import measure_links
from raytrain3d.parallel.migrate import channel_between, fill, moving_buffers, receive_layer, send_layer
from raytrain3d.parallel.optimizer import gather, update
from raytrain3d.parallel.pipeline import Around, LayerTimes, PipelineRun
from raytrain3d.parallel.snapshots import Snapshots
from raytrain3d.parallel.sums import Sums
from raytrain3d.parallel.weights import WeightGathering
from raytrain3d.plan.params import model_spec
from raytrain3d.plan.partition import Stages
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.rank_program import rank_program_for
from raytrain3d.plan.uses import layer_uses
from raytrain3d.train.faults import suffer
from raytrain3d.train.finite import FiniteWatch
from raytrain3d.train.holding import Holding, LayerBuilder
from raytrain3d.train.initial import initial_weights
from raytrain3d.train.inputs import feed
from raytrain3d.train.lr import learning_rate
from raytrain3d.train.memory import memory_in_use
from raytrain3d.train.peak import peak_flops
from raytrain3d.train.position import Phase, Position
from raytrain3d.train.report import EvaluationReport, Origin, SetReport, StepReport, Stopwatch, Timeline
from raytrain3d.train.standing import Standing


class Trainer:
    """Made in the thread that trains, since torch's thread count and device belong to a thread."""

    def __init__(self, config: JobConfig, plan: Plan, rank: int, *, loader: Loader | None = None,
                 device: torch.device | None = None, build: LayerBuilder = build_layers) -> None:
        config = plan.decided(config)
        torch.set_num_threads(config.placement.threads_per_rank)
        self._config, self._plan, self.rank = config, plan, rank
        self._at = plan.mesh.coordinate(rank)
        self._device = device or torch.device(f"cuda:{torch.cuda.current_device()}" if plan.device == "gpu" else "cpu")
        check_backend(config.train.compile, self._device)
        self._peak_flops = peak_flops(self._device, config.train.dtype) if config.metrics.peak_tflops is None else None
        self._spec = model_spec(config.model, config.train, plan.mesh.tensor)
        stages = plan.stages_of(self._at.pipeline)
        self._loader = loader or Loader(config, plan, self._at.data, tokens=0 in stages,
                                        targets=len(plan.stages) - 1 in stages)
        self._holding = Holding(config, self._spec, plan, self._at, self._device, build)
        self._buffers = Buffers((config.train.micro_batch, config.residual_sequence, config.model.hidden),
                                DTYPES[config.train.dtype], self._device)
        self._groups: Groups | None = None
        self._run: PipelineRun | None = None
        self._snapshots = HostMemory()
        self._copies = Snapshots()
        self._writer = ShardWriter(rank, share=SHARE_OF_CORE if self._device.type == "cpu" else 1.0)
        self._stop_asked = False
        self._watch = Stopwatch()
        self._now = self._generation = 0
        self._phase: Phase | None = None
        self._held: int | None = None
        self._updated: int | None = None
        self._agreed: tuple[int, CommitVector] | None = None

    @property
    def states(self) -> dict[int, LayerState]:
        """States held here, by index."""
        return self._holding.states

    @property
    def layers(self) -> dict[int, Layer]:
        """Modules of the layers held here, by index."""
        return self._holding.layers

    def connect(self, host: str, port: int, generation: int, replicas: Sequence[int] | None = None) -> None:
        """Join the driver's rendezvous store and make every process group of this rank. replicas: those that have ranks;
        default all of the plan."""
        self._plan = self._plan if replicas is None else self._plan.with_replicas(replicas)
        timeout_s = self._config.network.timeout_s
        self._generation = generation
        link = Link(join_store(host, port, timeout_s), generation, timeout_s, self._config.network.transport)
        self._groups = Groups(self._plan.mesh, self._plan.placement, self.rank, link, device=self._plan.device,
                              tensors_on=self._device, shard_group=self._config.shard_group,
                              present=self._plan.replicas)
        self._holding.connect(self._groups.tensor, self._plan.replicas)

    def join_ring(self, peers: Sequence[int]) -> None:
        """Exchange snapshots (`recovery.snapshot_interval`). peers: rank -> the rank that keeps a copy of its state; when
        they change, earlier copies are dropped."""
        self._copies.connect(*self._connected.make_ring(peers), tuple(peers))

    def initialize(self) -> None:
        """Fresh weights, a function of (seed, parameter name) alone, or those of `model.from_huggingface`."""
        self._held = None
        values = initial_weights(self._config)
        for state in self.states.values():
            state.fill(values)

    def begin_lease(self) -> None:
        """A wish to leave the lease before is over."""
        self._stop_asked = False

    def step(self, n: int) -> StepReport:
        """Train on the global batch of step n (from 1). The report is the same on all ranks but for rank and times."""
        self._watch = watch = Stopwatch()
        self._now, self._run = n, None
        self._phase = "data"
        micro_batches = self._loader.micro_batches(n)
        watch.lap("data_wait")
        self._phase = "program"
        suffer(self._config.debug.faults, self.rank, n, self._generation)
        reduction = self._holding.reduction(Sums(self._connected, DTYPES[self._config.reduce_dtype]))
        run = self._run_program(micro_batches, n, max(self._plan.shares), reduction)
        watch.lap("pipeline")
        self._phase = "reduction"
        reduction.finish()
        watch.lap("reduce_wait")
        self._phase = "commit"
        agreed = self._agree(n, run, micro_batches)
        watch.lap("commit_wait")
        origin = None if agreed.finite else self._examine(n, micro_batches)
        self._phase = "update"
        self._carry_out(n, agreed)
        interval = self._config.recovery.snapshot_interval
        if interval is not None and n % interval == 0 and agreed.copies_done and self._copies.has_peer:
            self._copies.take(n, self._plan.stages, self._moving())
        watch.lap("optimizer")
        self._phase = None
        return replace(self._report(n, agreed, run), origin=origin)

    def pass_over(self, n: int) -> StepReport:
        """Step n changes nothing and computes nothing: its data is left out, everything else goes on."""
        self._watch = Stopwatch()
        self._now, self._run, self._phase = n, None, "commit"
        vector = self._vector()
        vector.set_loss(self._at.data, math.nan, 0)
        agreed = self._sum(n, vector)
        self._phase = "update"
        self._carry_out(n, agreed)
        self._phase = None
        return self._report(n, agreed, None)

    def evaluate(self) -> EvaluationReport:
        """Losses on `evaluate.samples` samples from all over each validation set; the same on every rank."""
        watch = Stopwatch()
        return EvaluationReport(sets=tuple(map(self._evaluate, range(len(self._loader.validation_sets)))),
                                seconds=watch.total)

    def _evaluate(self, number: int) -> SetReport:
        """On one validation set."""
        chosen, micro_batches = self._loader.validation_sets[number], self._loader.validation(number)
        run = self._run_program(micro_batches, None, chosen.largest_share)
        vector = self._vector()
        for loss_sum in _on_host(self._loss_sum(run)):
            self._set_loss(vector, loss_sum, micro_batches)
        sum_over_all(vector.values, self._connected)
        agreed = vector.agreement()
        return SetReport(name=chosen.name, loss=agreed.loss, tokens=agreed.tokens, bytes_per_token=chosen.bytes_per_token)

    def save(self, directory: str, step: int, *, behind: bool) -> SaveStart:
        """Begin to write this rank's shard of a checkpoint of step `step`; `save_progress` has the receipt for the driver,
        which commits. behind: the state is copied to host memory, so that training may go on at once; else it must not
        before the shard is written."""
        watch = Stopwatch()
        pieces = [piece for state in self.states.values() if self._holding.speaks_for(state)
                  for piece in state.saved_pieces()]
        num_bytes = sum(piece.tensor.nbytes for piece in pieces)
        self._writer.start(directory, step, self._snapshots.copy(pieces) if behind else pieces, behind=behind)
        return SaveStart(pause_s=watch.total, num_bytes=num_bytes)

    def save_progress(self) -> SaveProgress:
        """Of the save begun last; from any thread."""
        return self._writer.progress

    def hurry_save(self) -> None:
        """From any thread: nothing trains until it is written."""
        self._writer.hurry()

    def call_off_save(self) -> None:
        """Leave a shard that is not written yet. Returns when nothing is written any more."""
        self._writer.call_off()

    def load(self, directory: str) -> None:
        """Fill weights and optimizer state from a checkpoint of any layout; moments with zeros from one of weights alone."""
        self._held = None
        with Reader(directory) as reader:
            if reader.holds_weights_alone:
                for state in self.states.values():
                    state.fill(lambda name, param, part: reader.weight(name, part))
                return
        read_into(directory, [piece for state in self.states.values() for piece in state.pieces()])

    def copy_layer(self, layer: int, source: int, target: int) -> int:
        """Part of a move: pipeline rank `target` gets a copy of a layer from `source`. Both keep it until `adopt`. All ranks
        of both take part, others have nothing to do. Returns the bytes that this rank has sent."""
        if self._at.pipeline not in (source, target):
            return 0
        channel = channel_between(self._connected.channels, source, target)
        if self._at.pipeline == source:
            return send_layer(self.states[layer], channel)
        receive_layer(self._holding.take(layer), channel)
        return 0

    def adopt(self, stages: Stages, shares: tuple[int, ...]) -> None:
        """From the next step on layers are split like this, and micro-batches are shared like this. Layers that are not
        this rank's any more are let go."""
        self._plan = replace(self._plan, stages=stages, shares=shares)
        self._holding.keep(self._plan)
        self._loader.adopt(self._plan)

    def standing(self) -> Standing:
        """What this rank holds. An error leaves it: only a step that has been agreed on changes parameters."""
        own, client = self._copies.own, self._copies.client
        if self._held is None:
            return Standing(own=own, client=client)
        agreed = None if self._agreed is None else (self._agreed[0], tuple(self._agreed[1].values.tolist()))
        return Standing(held=self._held, agreed=agreed, own=own, client=client)

    def stand_at(self, step: int) -> None:
        """The state is that of `step`; what is left of a later one is dropped."""
        for state in self.states.values():
            state.rest()
        if self._agreed is not None and self._agreed[0] > step:
            self._agreed = None
        self._copies.forget_after(step)
        self._held, self._updated = step, step

    def recover(self, step: int, values: Sequence[float] | None, fills: Sequence[tuple[int, int]]) -> StepReport | None:
        """After a failure every rank comes to hold `step`: who was about to carry it out does so, with the commit vector
        `values`; others have done it; ranks that hold nothing are filled, `fills`: (rank, rank that holds the same).
        Returns a report if the step was carried out here just now."""
        report = None
        if values is not None:
            vector = self._vector()
            vector.values.copy_(torch.tensor(values, dtype=torch.float64))
            if self._held is not None and self._held < step:
                self._update(step, self._rate(step), vector.agreement())
                report = self._report(step, vector.agreement(), None)
            self._agreed = (step, vector)
        for rank, donor in fills:
            if self.rank in (rank, donor):
                fill(list(self.states.values()), self._connected.data, rank, donor)
        self._gather()  # all do, since of those that share a layer only some may have come to it
        self.stand_at(step)
        return report

    def go_back(self, step: int, stages: Stages, fills: Sequence[tuple[int, int]]) -> None:
        """All ranks come to hold the snapshot of `step`, when layers were split into `stages`. fills: (rank that has none,
        rank that keeps its copy)."""
        self._held = None
        layers = replace(self._plan, stages=stages).layers_of_rank(self._at.pipeline)
        for layer in layers:
            if layer not in self.layers:
                self._holding.take(layer)
        self.adopt(stages, self._plan.shares)
        if self.rank in dict(fills):
            self._copies.get_back(step, stages, self._moving())
        else:
            self._copies.restore(step, self._moving())
        if self.rank in {keeper for _, keeper in fills}:
            self._copies.give_back(step)
        self.stand_at(step)

    def measure_links(self) -> dict[str, float]:
        """Latency and bandwidth of this rank's links by name. All ranks call it together."""
        return measure_links(self._connected, self._device)

    def request_stop(self) -> None:
        """From any thread: every rank leaves its lease after the same step, which is the next one that commits."""
        self._stop_asked = True

    def abort(self) -> None:
        """From any thread: another rank is lost, so nothing that is under way will be."""
        groups = self._groups
        if groups is not None:
            groups.abort()

    def disconnect(self) -> None:
        """Drop all groups, which wakes neighbours that wait on this rank. The state stays."""
        self._run = self._phase = None
        if self._groups is not None:
            self._groups.close()
            self._groups = None
        self._copies.disconnect()

    def close(self) -> None:
        """Stop reading ahead and writing, and drop all groups."""
        self.disconnect()
        self._writer.close()
        self._snapshots.close()
        self._loader.close()

    @property
    def current_op(self) -> str | None:
        """The op under way, or the one that an error ended."""
        return str(self._run.current) if self._run is not None and self._run.current is not None else None

    def position(self) -> Position:
        """From any thread: how far it is in its step."""
        run, op = self._run, self.current_op
        return Position(step=self._now, phase=self._phase, op=op, finished=0 if run is None else run.finished)

    @property
    def _connected(self) -> Groups:
        assert self._groups is not None, "connect() comes first"
        return self._groups

    def _run_program(self, micro_batches: Sequence[MicroBatch], step: int | None, largest_share: int,
                     *around: Around) -> PipelineRun:
        """`step` keys the dropout masks; None: evaluation, forwards alone, nothing is dropped. Where ranks of several
        replicas gather and reduce within ops, all replicas run the program of the largest share."""
        config, plan, present = self._config, self._plan, len(micro_batches)
        program = rank_program_for(plan.schedule, plan.mesh.pipeline, largest_share if config.joint_ops else present,
                                   plan.chunks, self._at.pipeline, training=step is not None, present=present)
        mail = Mail(self._connected.channels, program, self._buffers)
        uses = layer_uses(program.ops, {stage: plan.layers_of(stage) for stage in self._holding.stages})
        weights = WeightGathering(uses, self._holding.states_of, self._connected.shard,
                                  keep=config.train.keep_gathered == "step")
        inputs = feed(micro_batches, config.train, step=step, head=len(self._spec.layers) - 1, device=self._device)
        self._run = PipelineRun(self._holding.stages, mail, inputs, put_off=put_off,
                                clock=clock_for(self._device), around=(weights, *around),
                                offload=config.train.offload_activations,
                                slowdown=self._slowdown(step))
        self._run.execute(program)
        weights.finish()
        return self._run

    def _slowdown(self, step: int | None) -> Callable[[int], float] | None:
        """How much slower each layer shall be in this step (`debug.slowdown`)."""
        now = [slow for slow in self._config.debug.slowdown
               if step is not None and slow.is_on(step) and slow.rank in (None, self.rank)]
        if not now:
            return None
        return lambda layer: math.prod(slow.factor for slow in now if slow.layer in (None, layer))

    def _vector(self) -> CommitVector:
        return CommitVector(self._plan.mesh, len(self._spec.states), len(self._plan.ranks))

    def _loss_sum(self, run: PipelineRun) -> list[Tensor]:
        """One scalar on the rank that speaks for the replica's losses, if there are any."""
        return [torch.stack(run.losses).double().sum()] if run.losses and self._at.tensor == 0 else []

    def _set_loss(self, vector: CommitVector, loss_sum: float, micro_batches: Sequence[MicroBatch]) -> None:
        vector.set_loss(self._at.data, loss_sum, sum(micro_batch.num_loss_tokens for micro_batch in micro_batches))

    def _agree(self, n: int, run: PipelineRun, micro_batches: Sequence[MicroBatch]) -> Agreement:
        vector = self._vector()
        states = [state for state in self._holding.trained() if self._holding.speaks_for(state)]
        norms = [state.norms() for state in states]
        read = iter(_on_host([*chain.from_iterable(norms), *self._loss_sum(run)]))
        for state, parts in zip(states, norms, strict=True):
            vector.set_norm(state.spec.index, self._at.tensor, self._at.data, sum(next(read) ** 2 for _ in parts))
        for loss_sum in read:
            self._set_loss(vector, loss_sum, micro_batches)
        self._connected.check()  # after the device has come to the end of its reductions: the norms are of whole ones
        return self._sum(n, vector)

    def _sum(self, n: int, vector: CommitVector) -> Agreement:
        """What step n is, by the vectors of all ranks."""
        if self._copies.at_rest:
            vector.say_copies_done()
        if self._stop_asked:
            vector.ask_stop()

        def got() -> None:
            self._agreed = (n, vector)

        sum_over_all(vector.values, self._connected, got=got)
        return vector.agreement()

    def _examine(self, n: int, micro_batches: Sequence[MicroBatch]) -> Origin | None:
        """Compute step n, whose numbers are not finite, again: where on this rank finite numbers become others. All ranks
        do it together. None: not here, or not this time."""
        self._phase = "program"
        for state in self.states.values():
            state.rest()
        watch = FiniteWatch(self.layers, self._holding.states_of, [layer.name for layer in self._spec.layers],
                            lambda: self.current_op)
        reduction = self._holding.reduction(Sums(self._connected, DTYPES[self._config.reduce_dtype]))
        with watch.watching():
            self._run_program(micro_batches, n, max(self._plan.shares), watch, reduction)
            reduction.finish()
        watch.look_at_sums()
        self._connected.check()
        return watch.found

    def _carry_out(self, n: int, agreed: Agreement) -> None:
        """What step n does to the state, once all ranks know what it is."""
        self._update(n, self._rate(n), agreed)
        self._gather()
        for state in self.states.values():
            state.rest()
        self._held = n

    def _update(self, n: int, rate: float, agreed: Agreement) -> None:
        """The own parts, unless that was done before a failure or the gradient is not finite."""
        if self._updated == n or not agreed.finite:
            return
        clip = self._config.optimizer.clip_norm
        scale = 1.0 if clip is None else min(1.0, clip / (agreed.gradient_norm + 1e-6))
        for state in self._holding.trained():
            update(state, self._config.optimizer, step=n, rate=rate, scale=scale / max(agreed.tokens, 1))
        self._updated = n

    def _gather(self) -> None:
        """Updated parts from those that share a layer. Can be done again."""
        for work in [gather(state, self._connected.shard) for state in self._holding.trained()]:
            work.wait()

    def _moving(self) -> list[Tensor]:
        """All buffers of this rank's state but gradients, in a fixed order."""
        return [buffer for state in self.states.values() for buffer in moving_buffers(state)]

    def _rate(self, n: int) -> float:
        return learning_rate(self._config.learning_rate, n, self._config.train.steps)

    def _report(self, n: int, agreed: Agreement, run: PipelineRun | None) -> StepReport:
        """run: absent when a failure came between; times of its parts are not known then."""
        watch, times = self._watch, run.times() if run is not None else LayerTimes.none()
        return StepReport(
            step=n, rank=self.rank, loss=agreed.loss, tokens=agreed.tokens, gradient_norm=agreed.gradient_norm,
            learning_rate=self._rate(n), skipped=not agreed.finite, stop=agreed.stop, seconds=watch.total,
            compute_s=times.compute, data_wait_s=watch.lap_of("data_wait"),
            receive_wait_s=times.receive_wait, reduce_wait_s=watch.lap_of("reduce_wait"),
            commit_wait_s=watch.lap_of("commit_wait"), optimizer_s=watch.lap_of("optimizer"),
            memory_bytes=memory_in_use(self._device), peak_flops=self._peak_flops,
            layer_forward_s=dict(times.forward), layer_backward_s=dict(times.backward),
            layer_weight_s=dict(times.weight), timeline=self._timeline(n, run),
        )

    def _timeline(self, n: int, run: PipelineRun | None) -> Timeline | None:
        interval, watch = self._config.run.trace_interval, self._watch
        if run is None or interval is None or n % interval:
            return None
        return Timeline(start=time.time() - watch.total + watch.laps["data_wait"], seconds=watch.laps["pipeline"],
                        spans=tuple((str(op), start, end) for op, start, end in run.spans()))


def _on_host(scalars: Sequence[Tensor]) -> list[float]:
    """Of one type, on one device. The host waits for the device, once, however many they are."""
    return torch.stack(list(scalars)).tolist() if scalars else []
