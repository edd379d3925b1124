"""`raytrain3d profile`: one layer of each kind on the real device, alone, then on all devices of a node, and the links."""

from collections.abc import Sequence
from statistics import median

from raytrain3d.config import JobConfig
from raytrain3d.gang.launchers import Say, open_launcher
from raytrain3d.gang.run import device_of
from raytrain3d.gang.trial import Trial, make_trial_trainer, run_trial
from raytrain3d.gang.worker import TrainerFactory
from raytrain3d.metrics.summary import StepSummary
from raytrain3d.plan.catalogue import Node
from raytrain3d.plan.profile import BLOCKS, MICRO_BATCHES, LayerSeconds, Measured, Profile, calibrated, profiled_job

NUM_STEPS = 8


def profile_job(config: JobConfig, node: Node, *, launcher: str, address: str | None, say: Say,
                trainer: TrainerFactory = make_trial_trainer) -> Profile:
    """Constants of the cost and memory model for jobs like `config` on nodes like `node`. Takes up to three short starts, of
    as many ranks as a node has devices at most, with tensor ranks as in the job."""
    replicas = node.devices // config.mesh.tensor
    with open_launcher(launcher, config, address, say) as opened:
        def tried(job: JobConfig) -> Trial:
            say(f"measuring {job.mesh.replicas} x {job.mesh.pipeline} x {job.mesh.tensor} ranks")
            return run_trial(job, opened, num_steps=NUM_STEPS, say=say, trainer=trainer)

        alone = tried(profiled_job(config))
        full = tried(profiled_job(config, data=replicas)) if replicas > 1 and launcher != "inline" else None
        piped = tried(profiled_job(config, pipeline=2)) if replicas > 1 and launcher != "inline" else None
        on_cpu = device_of(config, opened) == "cpu"
    links = dict(alone.links[0]) | (dict(full.links[0]) if full is not None else {})
    links |= {name: value for name, value in (piped.links[0] if piped is not None else {}).items() if "channel" in name}
    return calibrated(config, node, measured(alone.steps), None if full is None else measured(full.steps), links,
                      on_cpu=on_cpu)


def measured(steps: Sequence[StepSummary]) -> Measured:
    """Of the steps of a profiled job without pipeline."""
    def middle(values: Sequence[float]) -> float:
        return median(values) / MICRO_BATCHES

    def layer(*indices: int) -> LayerSeconds:
        forward = [sum(step.layer_forward_s[i] for i in indices) / len(indices) for step in steps]
        backward = [sum(step.layer_backward_s.get(i, 0.0) + step.layer_weight_s.get(i, 0.0) for i in indices) / len(indices)
                    for step in steps]
        return LayerSeconds(forward=middle(forward), backward=middle(backward))

    ranks = [step.pipeline_ranks[0] for step in steps]
    rest = [step.seconds - rank.compute_s - rank.receive_wait_s - rank.reduce_wait_s - rank.optimizer_s
            for step, rank in zip(steps, ranks, strict=True)]
    return Measured(
        layers={"embedding": layer(0), "block": layer(*range(1, BLOCKS + 1)), "head": layer(BLOCKS + 1)},
        optimizer_s=median(rank.optimizer_s for rank in ranks), rest_s=max(0.0, median(rest)),
        memory_bytes=ranks[-1].memory_bytes or 0)
