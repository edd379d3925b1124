"""Groups of devices on a machine without any: messages through host memory, and the order that NCCL needs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from jobs import JobRunner, SyntheticLoader, small_job
from torch import Tensor

from raytrain3d.config import JobConfig
from raytrain3d.parallel.groups import Group
from raytrain3d.plan.plan import Plan
from raytrain3d.train.trainer import Trainer

pytestmark = pytest.mark.dist


def losses(config: JobConfig, plan: Plan, rank: int, port: int, generation: int, device: str) -> list[tuple[float, float]]:
    """Of four steps and, in another generation, two more; the plan is for such a device, tensors are on the CPU."""
    plan = replace(plan, device=device)
    trainer = Trainer(config, plan, rank, loader=SyntheticLoader(config, plan, plan.mesh.coordinate(rank).data),  # type: ignore[arg-type]
                      device=torch.device("cpu"))
    try:
        trainer.connect("127.0.0.1", port, generation)
        trainer.initialize()
        reports = [trainer.step(n) for n in range(1, 5)]
        trainer.abort()
        trainer.disconnect()
        trainer.connect("127.0.0.1", port, generation + 1000)
        reports += [trainer.step(n) for n in (5, 6)]
        return [(report.loss, report.gradient_norm) for report in reports]
    finally:
        trainer.close()


@pytest.mark.parametrize("train", [{"sequence_parallel": True}, {"sharding": "full"}], ids=["sequence_parallel", "sharded"])
def test_staged_groups_train_as_groups_of_hosts_do(train: dict[str, Any], run_job: JobRunner) -> None:
    """To the bit. The tied weight is exchanged by both ends of the pipeline."""
    config = small_job(mesh={"data": 2, "pipeline": 2, "tensor": 2}, model={"tied_embeddings": True}, train=train)
    config = replace(config, network=replace(config.network, transport="gloo"))
    assert run_job.call(losses, config, "gpu") == run_job.call(losses, config, "cpu")


class Done:
    def wait(self) -> None:
        pass


class Order:
    """A backend that writes down what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def backend(self, name: str, index: int, size: int, device: str) -> "Order":
        return self

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Done:
        self.calls.append(f"send to {to}")
        return Done()

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> Done:
        self.calls.append(f"receive from {sender}")
        return Done()

    def abort(self) -> None:
        self.calls.append("abort")


def group_of_two(rank: int, order: Order, device: str) -> Group:
    return Group("pair", (0, 1), rank, order, device=device)  # type: ignore[arg-type]


def test_of_two_that_exchange_one_sends_first() -> None:
    """Operations of a communicator of NCCL begin one after another: two receives would wait for each other."""
    orders = [Order(), Order()]
    for rank, order in enumerate(orders):
        group_of_two(rank, order, "gpu").exchange(torch.zeros(2))
    assert [order.calls for order in orders] == [["send to 1", "receive from 1"], ["receive from 0", "send to 0"]]


def test_a_device_group_is_aborted_once_and_one_of_hosts_never() -> None:
    device, host = Order(), Order()
    for order, kind in ((device, "gpu"), (host, "cpu")):
        group = group_of_two(0, order, kind)
        group.abort()
        group.close()
        group.close()
    assert (device.calls, host.calls) == (["abort"], [])
