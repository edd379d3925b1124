"""Which network interface has an address, and the environment that ranks communicate with."""

import psutil

from raytrain3d.config import JobConfig


def interface_of(address: str) -> str | None:
    """Name of this node's interface that has `address`; None when no interface has it."""
    return next((name for name, addresses in psutil.net_if_addrs().items()
                 if any(each.address == address for each in addresses)), None)


def rank_environment(config: JobConfig, address: str) -> dict[str, str]:
    """Environment variables of a rank on the node with `address`.

    Without an interface, gloo takes the address that the host name resolves to, which often is loopback or nothing.
    Mode 2 of NCCL's error handling and no monitoring: other modes end a survivor's process when a neighbour dies.
    """
    interface = config.network.interface or interface_of(address)
    interfaces = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return {"OMP_NUM_THREADS": str(config.placement.threads_per_rank), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
            "TORCH_NCCL_ENABLE_MONITORING": "0", **interfaces, **config.network.environment}
