"""Every metric of a run: the one table from which the exporter, the copy in Ray's metrics and docs/metrics.md are made.

A metric is read from what is written down anyway: a line of metrics.jsonl or events.jsonl, the plan or the configuration. So
what is exported is what was recorded. Names and units follow https://prometheus.io/docs/practices/naming/.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PREFIX = "raytrain3d_"
RUN = "run"
"""Label of every metric."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row. Its whole name is `PREFIX` + `name`, for counters with `_total` behind."""

    name: str
    type: Literal["counter", "gauge"]
    unit: str
    source: str
    """Where it is read: `FILE: PATH`, or `events.jsonl EVENT: PATH`. In a path `.` goes into a value, and each `[]` into all
    items of a list, which the labels number. A counter of events without a path counts them."""
    help: str
    labels: tuple[str, ...] = ()
    """Beside `run`: numbers of list items; of a counter of events, keys of the event."""
    is_sum: bool = False
    """A counter whose source is a sum already."""

    @property
    def full_name(self) -> str:
        return f"{PREFIX}{self.name}{'_total' if self.type == 'counter' else ''}"

    @property
    def file(self) -> str:
        return self.source.partition(":")[0].partition(" ")[0]

    @property
    def event(self) -> str:
        """The kind of event, for a source in events.jsonl."""
        return self.source.partition(":")[0].partition(" ")[2]

    @property
    def path(self) -> str:
        return self.source.partition(":")[2].strip()

    def read(self, record: Any) -> Iterator[tuple[tuple[str, ...], float]]:
        """(label values, value) of a record. A number that is null in a record was not finite; nothing for a key that is
        not there."""
        if self.event and not self.path:
            yield tuple(str(record[label]) for label in self.labels), 1.0
        else:
            yield from _read(record, self.path.split(".") if self.path else [], ())


def _read(value: Any, path: list[str], labels: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], float]]:
    if path and value is None:
        return
    if not path:
        yield labels, float("nan") if value is None else float(value)
        return
    name, depth = path[0].replace("[]", ""), path[0].count("[]")
    if isinstance(value, Mapping):
        if name not in value:
            return
        value = value[name]
    else:
        value = getattr(value, name)
    for numbers, item in _items(value, depth, labels):
        yield from _read(item, path[1:], numbers)


def _items(value: Any, depth: int, labels: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if depth == 0:
        yield labels, value
        return
    for number, item in enumerate(value):
        yield from _items(item, depth - 1, (*labels, str(number)))


AT = ("pipeline_rank",)
PLACE = ("replica", "pipeline_rank")
STEP, PIPELINE = "metrics.jsonl: ", "metrics.jsonl: pipeline_ranks[]."

CATALOGUE = (
    # Is it learning
    Metric("loss", "gauge", "nats", STEP + "loss", "Mean loss of the last step's tokens; NaN if it was not finite."),
    Metric("validation_loss", "gauge", "nats", "events.jsonl validation: loss", "Mean loss of the validation samples."),
    Metric("learning_rate", "gauge", "", STEP + "learning_rate", "Learning rate of the last step."),
    Metric("gradient_norm", "gauge", "", STEP + "gradient_norm", "Global gradient norm of the last step, before clipping."),
    Metric("step", "gauge", "steps", STEP + "step", "Number of the last step."),
    Metric("wanted_steps", "gauge", "steps", "config.yaml: train.steps", "Number of the step that the run ends after."),
    Metric("steps", "counter", "steps", STEP + "step", "Steps done by this driver; one that was done again counts once."),
    Metric("tokens", "counter", "tokens", STEP + "tokens",
           "Loss tokens of steps done by this driver; a step that was done again counts once."),
    Metric("skipped_steps", "counter", "steps", STEP + "skipped", "Steps that changed no parameter, for numbers that were "
           "not finite."),
    Metric("loss_spikes", "counter", "", "events.jsonl loss spike:", "Loss spikes that were told."),
    # How fast
    Metric("step_seconds", "gauge", "seconds", STEP + "seconds", "Time of the last step on its slowest rank."),
    Metric("predicted_step_seconds", "gauge", "seconds", STEP + "predicted_s",
           "Time the last step would have taken with its measured compute and the idle share that the plan predicts."),
    Metric("tokens_per_second", "gauge", "tokens/s", STEP + "tokens_per_s", "Loss tokens over the time of the last step."),
    Metric("model_flops_per_second", "gauge", "FLOP/s", STEP + "model_flops_per_s",
           "FLOPs that the model needs for the last step's tokens, recompute not counted, over its time; of all ranks."),
    Metric("mfu_ratio", "gauge", "ratio", STEP + "mfu",
           "Model FLOPs utilization: share of the peak of all ranks, which is metrics.peak_tflops, or a "
           "GPU's data sheet, or what a CPU was measured to reach; not for GPUs without any."),
    Metric("goodput_ratio", "gauge", "ratio", STEP + "goodput",
           "Share of the time since the first lease that went into steps which counted."),
    Metric("last_step_timestamp_seconds", "gauge", "seconds since 1970", STEP + "time", "When the last step was recorded."),
    # The pipeline
    Metric("idle_ratio", "gauge", "ratio", STEP + "idle_share", "Share of the last step without compute, mean of ranks."),
    Metric("predicted_idle_ratio", "gauge", "ratio", "plan.json: idle_share",
           "The same as the plan predicts it for the schedule, messages free."),
    Metric("imbalance_ratio", "gauge", "ratio", STEP + "imbalance",
           "Compute of the busiest pipeline rank over the mean of all; 1 is even."),
    Metric("pipeline_rank_idle_ratio", "gauge", "ratio", PIPELINE + "idle_share",
           "Share of the last step in which ranks at this place of their pipelines did not compute.", AT),
    Metric("compute_seconds", "counter", "seconds", PIPELINE + "compute_s", "Time in forward and backward ops.", AT),
    Metric("forward_seconds", "counter", "seconds", PIPELINE + "forward_s", "Time in forwards of layers.", AT),
    Metric("backward_seconds", "counter", "seconds", PIPELINE + "backward_s", "Time in backwards of layers.", AT),
    Metric("optimizer_seconds", "counter", "seconds", PIPELINE + "optimizer_s", "Time in the optimizer.", AT),
    Metric("receive_wait_seconds", "counter", "seconds", PIPELINE + "receive_wait_s",
           "Waiting for activations and gradients of other stages.", AT),
    Metric("reduce_wait_seconds", "counter", "seconds", PIPELINE + "reduce_wait_s",
           "Waiting for gradient reductions after the last backward.", AT),
    Metric("commit_wait_seconds", "counter", "seconds", PIPELINE + "commit_wait_s", "Waiting for the commit vector.", AT),
    Metric("data_wait_seconds", "counter", "seconds", PIPELINE + "data_wait_s", "Waiting for micro-batches.", AT),
    Metric("memory_bytes", "gauge", "bytes", PIPELINE + "memory_bytes",
           "Most memory of a rank at this place: peak allocated on its GPU, resident on a CPU.", AT),
    Metric("planned_memory_bytes", "gauge", "bytes", "plan.json: estimates[].memory.total",
           "The plan's estimate of a rank's tensors; a process on a CPU holds its libraries too.", AT),
    Metric("in_flight_micro_batches", "gauge", "micro-batches", "plan.json: estimates[].peak_in_flight",
           "Most activations that the schedule holds at a time, of one micro-batch and one stage each.", AT),
    Metric("place_compute_seconds", "gauge", "seconds", STEP + "places[][].compute_s",
           "Compute of the last step in one replica, mean of its tensor ranks.", PLACE),
    Metric("place_idle_ratio", "gauge", "ratio", STEP + "places[][].idle_share",
           "Idle share of the last step in one replica.", PLACE),
    Metric("stage_layers", "gauge", "layers", STEP + "stages[]", "Layers of a stage, embedding and head counted.",
           ("stage",)),
    Metric("replica_micro_batches", "gauge", "micro-batches", STEP + "shares[]", "Micro-batches of a replica in a step.",
           ("replica",)),
    Metric("rebalance_decisions", "counter", "", STEP + "rebalance.decisions",
           "Decisions about the split, those that left it as it was among them.", is_sum=True),
    Metric("rebalance_moves", "counter", "", STEP + "rebalance.moves", "Changes of the split.", is_sum=True),
    Metric("rebalance_layers", "counter", "layers", STEP + "rebalance.layers",
           "Layers moved; one across one stage boundary counts once.", is_sum=True),
    Metric("rebalance_bytes", "counter", "bytes", STEP + "rebalance.bytes", "Sent between ranks by moves.", is_sum=True),
    Metric("rebalance_seconds", "counter", "seconds", STEP + "rebalance.seconds", "Training stood still for moves.",
           is_sum=True),
    Metric("rebalance_predicted_gain_ratio", "gauge", "ratio", STEP + "rebalance.predicted_gain",
           "Step time before over after the last move that was decided, as predicted; NaN before there was one."),
    Metric("rebalance_achieved_gain_ratio", "gauge", "ratio", STEP + "rebalance.achieved_gain",
           "The same as measured; NaN until it is."),
    # The fleet
    Metric("gangs", "gauge", "gangs", STEP + "gangs", "Gangs that did the last step."),
    Metric("wanted_gangs", "gauge", "gangs", "config.yaml: mesh.replicas", "Gangs of the job's mesh, the most it may have."),
    Metric("failures", "counter", "", "events.jsonl failure:", "Failures that the run outlived, by cause: deaths of "
           "processes, preemptions of nodes, or errors that ranks raised.", ("cause",)),
    Metric("recoveries", "counter", "", "events.jsonl recovered:", "Recoveries."),
    Metric("recovery_seconds", "counter", "seconds", "events.jsonl recovered: seconds", "Time from failures to recoveries."),
    Metric("repeated_steps", "counter", "steps", "events.jsonl recovered: again", "Steps lost to failures and done again."),
    Metric("gangs_given_up", "counter", "gangs", "events.jsonl gang given up:", "Gangs that the run went on without."),
    Metric("gangs_taken_in", "counter", "gangs", "events.jsonl gang taken in:", "Gangs that joined the run later."),
    Metric("slow_ranks_named", "counter", "", "events.jsonl slow rank:", "Times that a rank was found slower than others."),
    # Checkpoints
    Metric("checkpoints", "counter", "", "events.jsonl checkpoint:", "Checkpoints committed."),
    Metric("checkpoint_failures", "counter", "", "events.jsonl checkpoint failed:", "Tries to save that failed."),
    Metric("checkpoints_skipped", "counter", "", "events.jsonl checkpoint skipped:",
           "Checkpoints left out since the one before was still being written."),
    Metric("last_checkpoint_timestamp_seconds", "gauge", "seconds since 1970", "events.jsonl checkpoint: state_time",
           "When the state of the newest checkpoint was copied; of the run's start before the first."),
    Metric("last_checkpoint_step", "gauge", "steps", "events.jsonl checkpoint: step", "Step of the newest checkpoint."),
    Metric("checkpoint_pause_seconds", "gauge", "seconds", "events.jsonl checkpoint: pause_s",
           "Training stood still for the last checkpoint."),
    Metric("checkpoint_write_seconds", "gauge", "seconds", "events.jsonl checkpoint: write_s",
           "The slowest rank's writing of the last checkpoint, behind the training."),
    Metric("checkpoint_bytes", "gauge", "bytes", "events.jsonl checkpoint: num_bytes", "Size of the last checkpoint."),
)

HEAD = """# Metrics

Every metric of a run. `raytrain3d metrics` prints this page; it is made from the table in `raytrain3d/metrics/catalogue.py`.
All have the label `run`; others are named in braces. The label `pipeline_rank` stands for all ranks at one place of their
pipelines: its values are means over replicas and tensor ranks (`memory_bytes`: the largest). Counters begin at 0 with the
driver's process and never go back while it lives. In Ray's own metrics the same names have `ray_` in front.

| metric | type | unit | meaning | from |
|---|---|---|---|---|"""


def reference(catalogue: Iterable[Metric] = CATALOGUE) -> str:
    """The page, in Markdown."""
    return "\n".join([HEAD, *(_row(metric) for metric in catalogue)]) + "\n"


def _row(metric: Metric) -> str:
    labels = "{" + ", ".join(metric.labels) + "}" if metric.labels else ""
    cells = (f"`{metric.full_name}{labels}`", metric.type, metric.unit, metric.help, f"`{metric.source.rstrip(':')}`")
    return f"| {' | '.join(cells)} |"
