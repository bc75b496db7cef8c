"""GPUs and networks as published, and the cluster that a plan is made for."""

import re
from dataclasses import dataclass

from megatron_opo.errors import RecipeError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """`memory` is what a driver leaves to programs, in bytes; the rest are published peaks: bf16
    FLOP/s of dense matrix products, bytes a second of memory, and bytes a second that one GPU sends
    to others of its node (one direction)."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    node_link: float


@dataclass(frozen=True)
class Network:
    """Between nodes: bytes a second that each GPU sends, in one direction."""

    name: str
    link: float


# Peaks: NVIDIA's data sheets, without sparsity. Memory: what CUDA reports as total.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-80", 79.1 * GIB, 312e12, 2039e9, 300e9),
        Gpu("h100", 79.1 * GIB, 989.4e12, 3350e9, 450e9),
        Gpu("h200", 139.8 * GIB, 989.4e12, 4800e9, 450e9),
        Gpu("b200", 178.3 * GIB, 2250e12, 8000e9, 900e9),
        Gpu("l40s", 44.4 * GIB, 362e12, 864e9, 32e9),
    )
}
NETWORKS = {
    network.name: network
    for network in (
        Network("ib-ndr", 50e9),
        Network("ib-hdr", 25e9),
        Network("100g-per-node", 12.5e9 / 8),
    )
}


# By what CUDA calls them: not those of other peaks (PCIe, NVL), nor parts of one (MIG).
DEVICES = {
    "a100-80": r"A100\b(?!.*MIG)",
    "h100": r"H100\b(?!.*(MIG|PCIe|NVL))",
    "h200": r"H200\b(?!.*(MIG|NVL))",
    "b200": r"B200\b(?!.*MIG)",
    "l40s": r"L40S\b(?!.*MIG)",
}


def peak_flops(device: str) -> float | None:
    """Of a device by its name (torch.cuda.get_device_name): `Gpu.flops`; None if it is unknown."""
    for name, pattern in DEVICES.items():
        if re.search(rf"\b{pattern}", device):
            return GPUS[name].flops
    return None


@dataclass(frozen=True)
class Cluster:
    """`rollout_nodes` of the nodes serve only; 0 means that servers share the trainers' GPUs."""

    gpu: Gpu
    network: Network
    nodes: int
    gpus_per_node: int
    rollout_nodes: int = 0

    @property
    def colocated(self) -> bool:
        return self.rollout_nodes == 0

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def trainer_gpus(self) -> int:
        return (self.nodes - self.rollout_nodes) * self.gpus_per_node

    @property
    def server_nodes(self) -> int:
        return self.rollout_nodes or self.nodes

    def ring(self, ranks: int, apart: int = 1) -> float:
        """Bytes a second that each of `ranks` ranks sends in a ring, which are `apart` apart.

        A ring that leaves its node is as many rings as it has ranks there, each over a link of its
        own, as NCCL makes them.
        """
        if ranks * apart <= self.gpus_per_node:
            return self.gpu.node_link
        in_node = max(1, self.gpus_per_node // apart)
        return min(self.gpu.node_link, in_node * self.network.link)

    def between(self, ranks: int) -> float:
        """Bytes a second from one rank to another, the last of so many consecutive ones."""
        return self.gpu.node_link if ranks <= self.gpus_per_node else self.network.link


def find_gpu(name: str, memory_gib: float | None = None) -> Gpu:
    """A published GPU, with another memory size if one is given.

    Raises:
        RecipeError: the name is unknown, or the size not above 0.
    """
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise RecipeError(
            f"--gpu: {name!r} is not known; allowed: {', '.join(GPUS)}. For another GPU take the "
            "nearest of these and give its memory with --gpu-memory-gb"
        )
    if memory_gib is None:
        return gpu
    if not 0 < memory_gib < float("inf"):
        raise RecipeError(f"--gpu-memory-gb: {memory_gib:g} is not a size; give GiB above 0")
    name = f"{gpu.name} with {memory_gib:g} GiB"
    return Gpu(name, memory_gib * GIB, gpu.flops, gpu.bandwidth, gpu.node_link)


def find_network(name: str) -> Network:
    """A named network, or one of so many Gbit/s per GPU: "400".

    Raises:
        RecipeError: neither.
    """
    if name in NETWORKS:
        return NETWORKS[name]
    if re.fullmatch(r"\d+(\.\d+)?", name) and float(name) > 0:
        return Network(f"{name} Gbit/s per GPU", float(name) / 8 * 1e9)
    raise RecipeError(
        f"--network: {name!r} is not known; allowed: {', '.join(NETWORKS)}, or the Gbit/s that "
        "each GPU has between nodes (400)"
    )
