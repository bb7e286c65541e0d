"""What a kind of device can do, each figure with its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ...errors import PlanError, near


@dataclass(frozen=True)
class DeviceKind:
    """Peak figures of one kind of device, per device. Bandwidths are bytes per second in one direction.

    ``KINDS["h100-80"].flops["bf16"]`` is 989.4e12. ``flops``: floating-point operations per second by dtype (``bf16``,
    ``fp32``, ``tf32``, ``fp8`` where the device has it), dense, without sparsity. ``memory``: bytes. ``bandwidth``: of
    its memory. ``link``: to the other devices of its node. ``network``: to other nodes, its share of the node's
    adapters. ``host``: to the memory of its host. ``host_memory``: its share of that memory in bytes, None where no
    data sheet of a system says it. Latencies are seconds. ``sources`` says for each figure where it is from; what
    begins with "assumed" is no measurement of your machines.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    link: float
    link_latency: float
    network: float
    network_latency: float
    host: float
    host_memory: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict[str, str])  # by the name of the figure


_NCCL = "NCCL src/graph/tuning.cc, hwLat: latency per hop of a ring with the Simple protocol"
_HOST = "an eighth of the {} of system memory in the {} data sheet; assumed for other systems"
_DGX = "its share of one adapter per GPU, as in {} data sheet; assumed for other systems"


def _sources(sheet: str, network: str, **other: str) -> dict[str, str]:
    figures = dict.fromkeys(("flops", "memory", "bandwidth", "link", "host"), sheet)
    return figures | {"network": network, "link_latency": _NCCL, "network_latency": _NCCL} | other


_A100 = DeviceKind(
    "a100-80",
    flops={"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    memory=80e9,
    bandwidth=2039e9,
    link=300e9,  # NVLink 3: 600 GB/s, both directions together
    link_latency=3.4e-6,
    network=25e9,  # 200 Gb/s
    network_latency=14e-6,
    host=32e9,  # PCIe 4 x16: 64 GB/s, both directions together
    host_memory=250e9,
    sources=_sources(
        "NVIDIA A100 Tensor Core GPU data sheet, A100 80GB SXM",
        _DGX.format("the NVIDIA DGX A100"),
        host_memory=_HOST.format("2 TB", "NVIDIA DGX A100 640GB"),
    ),
)
_H100 = DeviceKind(
    "h100-80",
    flops={"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12, "fp8": 1978.9e12},
    memory=80e9,
    bandwidth=3350e9,
    link=450e9,  # NVLink 4: 900 GB/s, both directions together
    link_latency=3.4e-6,
    network=50e9,  # 400 Gb/s
    network_latency=14e-6,
    host=64e9,  # PCIe 5 x16: 128 GB/s, both directions together
    host_memory=250e9,
    sources=_sources(
        "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM",
        _DGX.format("the NVIDIA DGX H100"),
        flops="NVIDIA H100 Tensor Core GPU Architecture (white paper), table of peak rates, H100 SXM5, dense",
        host_memory=_HOST.format("2 TB", "NVIDIA DGX H100"),
    ),
)
_H200 = replace(
    _H100,
    name="h200",
    memory=141e9,
    bandwidth=4800e9,
    sources=_sources(
        "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM",
        _DGX.format("the NVIDIA DGX H200"),
        flops="those of H100 SXM, whose chip it has (NVIDIA H200 data sheet, half of its figures with sparsity)",
        host_memory=_HOST.format("2 TB", "NVIDIA DGX H200"),
    ),
)
_B200 = replace(
    _H100,
    name="b200",
    flops={"bf16": 2250e12, "tf32": 1100e12, "fp32": 80e12, "fp8": 4500e12},
    memory=180e9,
    bandwidth=8000e9,
    link=900e9,  # NVLink 5: 1.8 TB/s, both directions together
    sources=_sources(
        "NVIDIA DGX B200 data sheet, an eighth of the system's figures",
        _DGX.format("the NVIDIA DGX B200"),
        flops="NVIDIA Blackwell Architecture Technical Brief, HGX B200, dense (half of the figures with sparsity)",
        link_latency=f"assumed: that of NVLink in {_NCCL}",
        host="assumed: PCIe 5 x16, as the processors of DGX B200 have it",
        host_memory=_HOST.format("2 TB", "NVIDIA DGX B200"),
    ),
)
_GB200 = replace(
    _B200,
    name="gb200",
    flops={"bf16": 2500e12, "tf32": 1250e12, "fp32": 80e12, "fp8": 5000e12},
    memory=186e9,
    host=225e9,  # NVLink-C2C: 900 GB/s, both directions together, for the two GPUs of a processor
    host_memory=236e9,
    sources=_sources(
        "NVIDIA GB200 NVL72 data sheet, a 72nd of the system's figures",
        "assumed: a 400 Gb/s adapter for each GPU",
        flops="NVIDIA GB200 NVL72 data sheet, a 72nd of the system's figures, dense (half of those with sparsity)",
        host_memory="NVIDIA GB200 NVL72 data sheet, a 72nd of the 17 TB of the system's processors",
        link_latency=f"assumed: that of NVLink in {_NCCL}",
    ),
)
_H800 = replace(
    _H100,
    name="h800",
    link=200e9,  # NVLink: 400 GB/s, both directions together
    host_memory=None,
    sources=_sources(
        "those of H100 SXM, whose chip it has",
        "DeepSeek-V3 (arXiv:2412.19437), section 3.2.2: InfiniBand of 50 GB/s for each GPU",
        link="NVLink of 400 GB/s, both directions together; DeepSeek-V3 (section 3.2.2) reaches 160 GB/s in one",
    ),
)
_H20 = replace(
    _H100,
    name="h20",
    flops={"bf16": 148e12, "tf32": 74e12, "fp32": 44e12, "fp8": 296e12},
    memory=96e9,
    bandwidth=4000e9,
    host_memory=None,
    sources=_sources("NVIDIA H20 data sheet, 96 GB", _DGX.format("the NVIDIA DGX H100")),
)
_MI300X = replace(
    _H100,
    name="mi300x",
    flops={"bf16": 1307.4e12, "tf32": 653.7e12, "fp32": 163.4e12, "fp8": 2614.9e12},
    memory=192e9,
    bandwidth=5300e9,
    link=448e9,  # seven links of 128 GB/s, both directions together
    host_memory=None,
    sources=_sources(
        "AMD Instinct MI300X data sheet, dense",
        "assumed: a 400 Gb/s adapter for each GPU",
        link_latency=f"assumed: that of NVLink in {_NCCL}",
    ),
)
_L40S = DeviceKind(
    "l40s",
    flops={"bf16": 362.05e12, "tf32": 183e12, "fp32": 91.6e12, "fp8": 733e12},
    memory=48e9,
    bandwidth=864e9,
    link=32e9,  # no NVLink; PCIe 4 x16: 64 GB/s, both directions together
    link_latency=5.7e-6,
    network=12.5e9,  # 100 Gb/s
    network_latency=14e-6,
    host=32e9,
    sources=_sources("NVIDIA L40S data sheet", "assumed: a 200 Gb/s adapter for two GPUs"),
)
_CPU = DeviceKind(
    "cpu",
    flops={"bf16": 96e9, "fp32": 96e9},
    memory=4e9,
    bandwidth=10e9,
    link=10e9,
    link_latency=5e-6,
    network=1.25e9,
    network_latency=50e-6,
    host=10e9,
    sources={
        "flops": "assumed: a core of 3 GHz with two 256-bit multiply-add units; no unit of its own for bf16",
        "memory": "assumed: 4 GB for each core",
        "bandwidth": "assumed: 10 GB/s for each core when all are busy",
        "link": "assumed: a copy through shared memory",
        "link_latency": "assumed: waking a process",
        "network": "assumed: 10 Gb/s Ethernet",
        "network_latency": "assumed: TCP on Ethernet",
        "host": "assumed: a copy within memory",
    },
)

#: By name. A device of kind ``cpu`` is one core.
KINDS: Mapping[str, DeviceKind] = {
    k.name: k for k in (_A100, _H100, _H200, _H800, _H20, _B200, _GB200, _MI300X, _L40S, _CPU)
}

# As nvidia-smi names them. Cards in PCIe slots have other clocks and links than those on a board, so they do not count.
_CARDS = (
    (re.compile(r"A100-SXM\S*-80GB"), "a100-80"),
    (re.compile(r"H100 80GB HBM3"), "h100-80"),
    (re.compile(r"(?<!G)H200(?! NVL)"), "h200"),
    (re.compile(r"H800(?! PCIe)"), "h800"),
    (re.compile(r"H20(?![\w-])"), "h20"),
    (re.compile(r"GB200"), "gb200"),
    (re.compile(r"(?<!G)B200"), "b200"),
    (re.compile(r"L40S"), "l40s"),
)


def kind_named(name: str) -> DeviceKind:
    """Return the kind of that name. Raises PlanError with the nearest one."""
    if name not in KINDS:
        word = name.lower()
        meant = next((k for k in KINDS if word and k.startswith(word)), None) or near(word, KINDS)
        fix = f"Did you mean '{meant}'?" if meant else "Name the nearest of these."
        raise PlanError(f"there is no device '{name}'.", have=KINDS, fix=fix)
    return KINDS[name]


def kind_of_card(card: str) -> str:
    """Return the kind of a GPU as nvidia-smi names it: ``NVIDIA H100 80GB HBM3`` is ``h100-80``. Raises PlanError."""
    for pattern, kind in _CARDS:
        if pattern.search(card):
            return kind
    raise PlanError(
        f"this machine has '{card}', a GPU whose figures are not known here.",
        have=KINDS,
        fix="Write the nearest kind instead of auto, with the number of GPUs: cluster: h100-80:1x8.",
    )
