"""A Ray cluster of two nodes on this machine, with the application of deploy/ray. Run by Ray's Python; ends with its
standard input.

python tests/ray/cluster.py PORT COMMAND
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "ray"
sys.path.insert(0, str(FOLDER))

import ray  # noqa: E402
from inferd_ray import build  # noqa: E402
from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

STORE_BYTES = 100 * 2**20


def main() -> None:
    port, command = int(sys.argv[1]), sys.argv[2]
    cluster = Cluster()
    for _ in range(2):  # a replica needs a whole processor, so each node gets one
        cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, include_dashboard=False)
    ray.init(address=cluster.address, runtime_env={"working_dir": str(FOLDER)}, log_to_driver=False)
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        flags = "--num-threads 1 --max-num-seqs 4 --max-waiting 4"
        serve.run(build({"model": "tiny", "replicas": "2", "command": command, "flags": flags}))
        nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        print(f"READY on {len(nodes)} nodes with Ray {ray.__version__}", flush=True)
        sys.stdin.read()
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
