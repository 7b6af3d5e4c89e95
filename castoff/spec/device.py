"""What the silicon can do: peaks per dtype, memory, links between devices and to the host, read from one TOML file.

Every figure is in SI units, per device. A device is what the runtime calls one: a GPU, or one die of an Atlas A3 card.
How well a serving stack drives it (efficiencies, launch costs) is the backend's, not the device's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from castoff.spec.toml_file import Table, find_toml, read_toml, shipped_names

MatrixDType = Literal["fp32", "bf16", "fp16", "int8", "fp8", "fp4"]
VectorDType = Literal["fp32", "bf16"]
Vendor = Literal["ascend", "nvidia", "cpu"]
Topology = Literal["full_mesh", "switch"]
HostLinkOrigin = Literal["measured", "datasheet", "assumed"]

MATRIX_DTYPES: tuple[MatrixDType, ...] = get_args(MatrixDType)
VECTOR_DTYPES: tuple[VectorDType, ...] = get_args(VectorDType)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTier:
    """One level of the interconnect; `num_devices` counts all devices that one unit of this tier joins."""

    name: str
    num_devices: int
    # In one direction, per device, all of the device's links of this tier together.
    bandwidth_bytes_per_s: float
    latency_s: float
    topology: Topology
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    size_bytes: int
    bandwidth_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """The link to host memory: rates of one link, which `devices_per_link` devices share when all use it.

    Rates are what large copies reach, not the nominal rate of the link. Fetching separate rows of 656 to 1152 bytes
    reaches `row_efficiency` of `to_device_bytes_per_s`. `host_memory_bytes` and `devices_per_host` are of one host.
    """

    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    latency_s: float
    row_efficiency: float
    devices_per_link: int
    host_memory_bytes: int
    devices_per_host: int
    origin: HostLinkOrigin
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator and what surrounds it; `matrix_flops_per_s` lists the dtypes its matrix units compute in.

    num_cores: what a kernel's blocks are dealt to (streaming multiprocessors, AI cores); None where nothing asks.
    tiers: the interconnect, innermost first; none for a device that stands alone.
    Peaks are dense. Integer peaks are operations per second. `sources` maps each section of the file to its source.
    """

    name: str
    vendor: Vendor
    description: str
    default_backend: str
    matrix_flops_per_s: Mapping[str, float] = field(hash=False)
    vector_flops_per_s: Mapping[str, float] = field(hash=False)
    memory: DeviceMemory
    tiers: tuple[LinkTier, ...]
    host_link: HostLink
    num_cores: int | None = None
    sources: Mapping[str, str] = field(hash=False)

    @property
    def max_devices(self) -> int:
        """The largest number of devices that the outermost tier joins; 1 where no links are described."""
        return self.tiers[-1].num_devices if self.tiers else 1

    def supports(self, dtype: str) -> bool:
        """Whether the matrix units compute in `dtype`."""
        return dtype in self.matrix_flops_per_s


def load_device(name_or_path: str) -> Device:
    """A shipped device by its exact name, or a device file by its path; raises `CastoffError`."""
    return _read_device(read_toml(find_toml("device", name_or_path)))


def shipped_devices() -> tuple[str, ...]:
    return shipped_names("device")


def _read_device(table: Table) -> Device:
    table.only(item.name for item in fields(Device) if item.name != "sources")
    matrix = table.table("matrix_flops_per_s")
    matrix.only(("source", *MATRIX_DTYPES))
    matrix_flops_per_s: dict[str, float] = {
        dtype: matrix.positive(dtype) for dtype in MATRIX_DTYPES if dtype in matrix.values
    }
    if not matrix_flops_per_s:
        raise table.fault("matrix_flops_per_s", f"must give at least one of {', '.join(MATRIX_DTYPES)}")
    vector = table.table("vector_flops_per_s")
    vector.only(("source", *VECTOR_DTYPES))
    memory = _read_memory(table.table("memory"))
    tiers = _read_tiers(table) if "tiers" in table.values else ()
    host_link = _read_host_link(table.table("host_link"))
    return Device(
        name=table.text("name"),
        vendor=table.choice("vendor", get_args(Vendor)),
        description=table.text("description"),
        default_backend=table.text("default_backend"),
        matrix_flops_per_s=matrix_flops_per_s,
        vector_flops_per_s={dtype: vector.positive(dtype) for dtype in VECTOR_DTYPES},
        memory=memory,
        tiers=tiers,
        host_link=host_link,
        num_cores=table.count("num_cores") if "num_cores" in table.values else None,
        sources={
            "matrix_flops_per_s": matrix.text("source"),
            "vector_flops_per_s": vector.text("source"),
            "memory": memory.source,
            **{f"tiers.{tier.name}": tier.source for tier in tiers},
            "host_link": host_link.source,
        },
    )


def _read_memory(table: Table) -> DeviceMemory:
    table.only(item.name for item in fields(DeviceMemory))
    return DeviceMemory(
        size_bytes=table.count("size_bytes"),
        bandwidth_bytes_per_s=table.positive("bandwidth_bytes_per_s"),
        source=table.text("source"),
    )


def _read_tiers(table: Table) -> tuple[LinkTier, ...]:
    """The tiers, innermost first: each joins whole units of the tier inside it."""
    tiers: list[LinkTier] = []
    num_inside = 1
    for item in table.tables("tiers"):
        tier = _read_tier(item)
        if tier.num_devices <= num_inside or tier.num_devices % num_inside:
            raise item.fault(
                "num_devices",
                f"must be a multiple of the {num_inside} of the tier inside it, and greater, got {tier.num_devices}",
            )
        if any(tier.name == inner.name for inner in tiers):
            raise item.fault("name", f"must differ from the other tiers' names, got {tier.name!r} twice")
        tiers.append(tier)
        num_inside = tier.num_devices
    return tuple(tiers)


def _read_tier(table: Table) -> LinkTier:
    table.only(item.name for item in fields(LinkTier))
    return LinkTier(
        name=table.text("name"),
        num_devices=table.count("num_devices", at_least=2),
        bandwidth_bytes_per_s=table.positive("bandwidth_bytes_per_s"),
        latency_s=table.at_least_zero("latency_s"),
        topology=table.choice("topology", get_args(Topology)),
        source=table.text("source"),
    )


def _read_host_link(table: Table) -> HostLink:
    table.only(item.name for item in fields(HostLink))
    return HostLink(
        to_device_bytes_per_s=table.positive("to_device_bytes_per_s"),
        to_host_bytes_per_s=table.positive("to_host_bytes_per_s"),
        latency_s=table.at_least_zero("latency_s"),
        row_efficiency=table.fraction("row_efficiency"),
        devices_per_link=table.count("devices_per_link"),
        host_memory_bytes=table.count("host_memory_bytes"),
        devices_per_host=table.count("devices_per_host"),
        origin=table.choice("origin", get_args(HostLinkOrigin)),
        source=table.text("source"),
    )
