"""A cluster that grows and shrinks by Ray's autoscaler (version 2) on one machine: nodes are raylets of made-up size."""

import json
from pathlib import Path
from typing import Any

from ray_head import RayHead

HEAD_ID = "f" * 51 + "00000"
"""What the provider takes for its head."""
LISTS = ("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands",
         "head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter")
IDLE_S = 6


class FakeAutoscaling(RayHead):
    """node_types: name -> resources, labels and max_workers, as in the launcher's files. The head holds no ranks."""

    def __init__(self, node_types: dict[str, Any], max_workers: int) -> None:
        super().__init__(environment={
            "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
            "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "3"})
        small = {"object_store_memory": 80 * 2**20}
        types = {name: {"node_config": {}, "min_workers": 0, **kind, "resources": {**kind["resources"], **small}}
                 for name, kind in node_types.items()}
        types["ray.head.default"] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
        self._config = {
            "cluster_name": "fake", "max_workers": max_workers, "head_node_type": "ray.head.default",
            "available_node_types": types,
            "auth": {}, "docker": {}, "file_mounts": {}, "file_mounts_sync_continuously": False, "upscaling_speed": 100.0,
            "idle_timeout_minutes": IDLE_S / 60, **{key: [] for key in LISTS},
            "provider": {"type": "external", "use_node_id_as_ip": True, "disable_node_updaters": True,
                         "disable_launch_config_check": True, "launch_multiple": True, "head_node_id": HEAD_ID,
                         "gcs_address": self.address,
                         "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"}}

    def begin(self) -> None:
        file = Path(self.directory, "autoscaling.json")
        file.write_text(json.dumps(self._config))
        self.start("--autoscaling-config", str(file), num_cpus=0)
