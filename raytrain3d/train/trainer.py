"""One rank: its layers, its groups, its step. Runs the same alone, in a plain process and inside a Ray actor.

A step computes and reduces gradients, agrees with all ranks, and only then changes parameters.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from raytrain3d.checkpoint.manifest import Receipt
from raytrain3d.checkpoint.store import read_into, write_shard
from raytrain3d.config import JobConfig
from raytrain3d.data.loader import Loader, MicroBatch
from raytrain3d.model.dropout import DropoutKeys
from raytrain3d.model.functional import put_off
from raytrain3d.model.init import initial_values
from raytrain3d.model.transformer import build_layers
from raytrain3d.parallel.channels import Buffers, Mail
from raytrain3d.parallel.commit import Agreement, CommitVector, sum_over_all
from raytrain3d.parallel.gradients import GradientReduction
from raytrain3d.parallel.groups import Groups, Link, join_store
from raytrain3d.parallel.layer_state import DTYPES, LayerState
from raytrain3d.parallel.links import measure_links
from raytrain3d.parallel.optimizer import gather, update
from raytrain3d.parallel.pipeline import Feed, PipelineRun, Stage
from raytrain3d.parallel.tensor import apply_tensor_parallelism
from raytrain3d.plan.params import model_spec
from raytrain3d.plan.plan import Plan
from raytrain3d.plan.rank_program import rank_program_for
from raytrain3d.train.lr import learning_rate
from raytrain3d.train.report import EvaluationReport, StepReport, Stopwatch, Timeline


class Trainer:
    """Made in the thread that trains, since torch's thread count and device belong to a thread."""

    def __init__(self, config: JobConfig, plan: Plan, rank: int, *, loader: Loader | None = None,
                 device: torch.device | None = None) -> None:
        torch.set_num_threads(config.placement.threads_per_rank)
        self._config, self._plan, self.rank = config, plan, rank
        self._at = plan.mesh.coordinate(rank)
        self._device = device or torch.device(f"cuda:{torch.cuda.current_device()}" if plan.device == "gpu" else "cpu")
        self._spec = model_spec(config.model, config.train, plan.mesh.tensor)
        self._loader = loader or Loader(config, plan, self._at.data)
        layers = plan.layers_of_rank(self._at.pipeline)
        self.states = {spec.index: LayerState(spec, config, plan.mesh, self._at, self._device)
                       for spec in self._spec.states_of(layers)}
        self.layers = build_layers(config.model, layers)
        self._bind()
        self._stages = {stage: Stage({layer: self.layers[layer] for layer in plan.layers_of(stage)},
                                     is_first=stage == 0, is_last=stage == len(plan.stages) - 1)
                        for stage in plan.stages_of(self._at.pipeline)}
        self._buffers = Buffers((config.train.micro_batch, config.train.sequence, config.model.hidden),
                                DTYPES[config.train.dtype], self._device)
        self._groups: Groups | None = None
        self._run: PipelineRun | None = None
        self._stop_asked = False

    def _bind(self) -> None:
        shared = self._spec.tied.index if self._spec.tied is not None else None
        tied = self.states[shared].parameters if shared in self.states else {}
        for index, layer in self.layers.items():
            layer.bind(self.states[index].parameters)
            if tied and layer is self.layers.get(0):
                layer.bind({"tokens.weight": tied["tokens.weight"]})
            if tied and index == len(self._spec.layers) - 1:
                layer.bind({"output.weight": tied["tokens.weight"]})

    def connect(self, host: str, port: int, generation: int) -> None:
        """Join the driver's rendezvous store and make every process group of this rank."""
        timeout_s = self._config.network.timeout_s
        link = Link(join_store(host, port, timeout_s), generation, timeout_s)
        self._groups = Groups(self._plan.mesh, self._plan.placement, self.rank, link, device=self._plan.device)
        for layer in self.layers.values():
            apply_tensor_parallelism(layer, self._groups.tensor, heads=self._config.model.heads)

    def initialize(self) -> None:
        """Fresh weights, a function of (seed, parameter name) alone."""
        model, seed = self._config.model, self._config.train.seed
        for state in self.states.values():
            state.fill(lambda name, param, part: initial_values(model, seed, name, param, part))

    def step(self, n: int) -> StepReport:
        """Train on the global batch of step n (from 1). The report is the same on all ranks but for rank and times."""
        watch = Stopwatch()
        micro_batches = self._loader.micro_batches(n)
        watch.lap("data_wait")
        reduction = self._new_reduction()
        run = self._run_program(micro_batches, n, reduction)
        watch.lap("pipeline")
        reduction.finish()
        watch.lap("reduce_wait")
        agreed = self._agree(run, micro_batches)
        watch.lap("commit_wait")
        rate = learning_rate(self._config.learning_rate, n, self._config.train.steps)
        if agreed.finite:
            self._update(n, rate, agreed)
        for state in self._trained():
            state.gradient.zero_()
        watch.lap("optimizer")
        return self._report(n, agreed, rate, run, watch)

    def evaluate(self) -> EvaluationReport:
        """Loss on the first `evaluate.samples` validation samples; the same on every rank."""
        watch = Stopwatch()
        micro_batches = self._loader.validation()
        run = self._run_program(micro_batches, None, None)
        vector = CommitVector(self._plan.mesh, len(self._spec.states))
        self._set_loss(vector, run, micro_batches)
        sum_over_all(vector.values, self._connected)
        agreed = vector.agreement()
        return EvaluationReport(loss=agreed.loss, tokens=agreed.tokens, seconds=watch.total)

    def save(self, directory: str, step: int) -> Receipt:
        """Write this rank's shard of a checkpoint of step `step`; the receipt goes to the driver, which commits."""
        pieces = [piece for state in self.states.values() if self._saves(state) for piece in state.pieces()
                  if state.writes(piece)]
        return write_shard(directory, self.rank, pieces, step=step)

    def load(self, directory: str) -> None:
        """Fill weights and optimizer state from a checkpoint of any layout."""
        read_into(directory, [piece for state in self.states.values() for piece in state.pieces()])

    def measure_links(self) -> dict[str, float]:
        """Latency and bandwidth of this rank's links by name. All ranks call it together."""
        return measure_links(self._connected, self._device)

    def request_stop(self) -> None:
        """From any thread: every rank leaves its lease after the same step, which is the next one that commits."""
        self._stop_asked = True

    def close(self) -> None:
        """Stop reading ahead and drop all groups, which wakes neighbours that wait on this rank."""
        self._run = None
        self._loader.close()
        if self._groups is not None:
            self._groups.close()
            self._groups = None

    @property
    def current_op(self) -> str | None:
        """The op under way, or the one that an error ended."""
        return str(self._run.current) if self._run is not None and self._run.current is not None else None

    @property
    def _connected(self) -> Groups:
        assert self._groups is not None, "connect() comes first"
        return self._groups

    def _trained(self) -> list[LayerState]:
        return [state for state in self.states.values() if not state.spec.frozen]

    def _saves(self, state: LayerState) -> bool:
        """A tied state lives on both end stages; the first one saves it and counts its norm."""
        return state.spec.kind != "tied" or 0 in self._stages

    def _new_reduction(self) -> GradientReduction:
        tied = self._spec.tied.index if self._spec.tied is not None else None
        order = sorted((state.spec.index for state in self._trained() if state.spec.index != tied), reverse=True)
        if tied in self.states and not self.states[tied].spec.frozen:
            order.append(tied)
        return GradientReduction(self.states, order, self._connected, tied)

    def _run_program(self, micro_batches: Sequence[MicroBatch], step: int | None,
                     reduction: GradientReduction | None) -> PipelineRun:
        """`step` keys the dropout masks; None: evaluation, forwards alone, nothing is dropped."""
        config, last = self._config, len(self._spec.layers) - 1

        def tokens(i: int) -> Tensor:
            return micro_batches[i].tokens.to(self._device)

        def arguments(i: int, layer: int) -> tuple[Tensor | DropoutKeys | None, ...]:
            if layer == last:
                return (micro_batches[i].targets.to(self._device),)
            if step is None:
                return (None,)
            return (DropoutKeys(seed=config.train.seed, step=step, samples=micro_batches[i].samples),)

        plan = self._plan
        program = rank_program_for(plan.schedule, plan.mesh.pipeline, len(micro_batches), plan.chunks,
                                   self._at.pipeline, training=step is not None)
        mail = Mail(self._connected.channels, program, self._buffers)
        interval = config.run.trace_interval
        self._run = PipelineRun(self._stages, mail, Feed(tokens, arguments), put_off=put_off,
                                recompute=config.train.recompute == "full",
                                layer_done=reduction.ready if reduction is not None else lambda layer: None,
                                record=interval is not None and step is not None and step % interval == 0)
        self._run.execute(program)
        return self._run

    def _set_loss(self, vector: CommitVector, run: PipelineRun, micro_batches: Sequence[MicroBatch]) -> None:
        if run.losses and self._at.tensor == 0:
            tokens = sum(micro_batch.num_loss_tokens for micro_batch in micro_batches)
            vector.set_loss(self._at.data, float(torch.stack(run.losses).double().sum()), tokens)

    def _agree(self, run: PipelineRun, micro_batches: Sequence[MicroBatch]) -> Agreement:
        vector = CommitVector(self._plan.mesh, len(self._spec.states))
        for state in self._trained():
            if self._saves(state):
                vector.set_norm(state.spec.index, self._at.tensor, self._at.data, state.squared_norm())
        self._set_loss(vector, run, micro_batches)
        if self._stop_asked:
            vector.ask_stop()
        sum_over_all(vector.values, self._connected)
        return vector.agreement()

    def _update(self, n: int, rate: float, agreed: Agreement) -> None:
        clip = self._config.optimizer.clip_norm
        scale = 1.0 if clip is None else min(1.0, clip / (agreed.gradient_norm + 1e-6))
        for state in self._trained():
            update(state, self._config.optimizer, step=n, rate=rate, scale=scale / max(agreed.tokens, 1))
            gather(state, self._connected.data)

    def _report(self, n: int, agreed: Agreement, rate: float, run: PipelineRun, watch: Stopwatch) -> StepReport:
        times = run.times
        return StepReport(
            step=n, rank=self.rank, loss=agreed.loss, tokens=agreed.tokens, gradient_norm=agreed.gradient_norm,
            learning_rate=rate, skipped=not agreed.finite, stop=agreed.stop, seconds=watch.total,
            compute_s=times.compute, data_wait_s=watch.laps["data_wait"],
            receive_wait_s=times.receive_wait, reduce_wait_s=watch.laps["reduce_wait"],
            commit_wait_s=watch.laps["commit_wait"], optimizer_s=watch.laps["optimizer"],
            layer_forward_s=dict(times.forward), layer_backward_s=dict(times.backward),
            layer_weight_s=dict(times.weight), timeline=_timeline(run, watch),
        )


def _timeline(run: PipelineRun, watch: Stopwatch) -> Timeline | None:
    if not run.spans:
        return None
    zero = run.spans[0][1]
    return Timeline(start=time.time() - (time.perf_counter() - zero), seconds=watch.laps["pipeline"],
                    spans=tuple((str(op), start - zero, end - zero) for op, start, end in run.spans))
