"""The options of the low-latency programs that choose a network. What is not given is the environment's to say."""

import argparse
from typing import Any


def add_network_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transport", choices=("direct", "ibgda", "nvshmem"))
    parser.add_argument("--num-nvl-peers", type=int, help="ranks of a node")
    parser.add_argument("--num-qps", type=int, dest="num_qps_per_rank", help="queue pairs for each peer")


def network_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments of `nbep.Buffer`."""
    names = ("transport", "num_nvl_peers", "num_qps_per_rank")
    return {name: value for name in names if (value := getattr(options, name)) is not None}
