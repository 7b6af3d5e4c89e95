"""How a serving stack drives a device: launch costs, efficiencies per op family, fusions, read from one TOML file.

In the file, `[curves.default]` is complete; `[curves.<family>]` gives what differs, with its own origin and source. A
file with `extends` has all else from another backend, section by section and curve by curve. `[fits.<kernel>]` are
fitted to measurements on one device, which the file names as `device`; a shipped backend's lie in a file per device.
`[fits.<kernel>]` with nothing but `of` takes the kernel's fit from that backend, where it has one on the device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Literal, get_args

from castoff.spec.device import Vendor
from castoff.spec.fits import Fit, read_fit
from castoff.spec.serving import ServingCost, read_serving, serving_sources
from castoff.spec.toml_file import Table, find_toml, read_toml, shipped_fit_devices, shipped_fits, shipped_names, shown

Origin = Literal["measured", "calibrated", "analytic", "assumed"]
Family = Literal[
    "matmul",
    "grouped_matmul",
    "sparse_attention_prefill",
    "sparse_attention_decode",
    "dense_attention_prefill",
    "dense_attention_decode",
    "indexer",
    "norm",
    "elementwise",
    "moe_routing",
    "embedding",
    "sampling",
    "offload_plan",
    "offload_serve",
    "offload_copy",
]
Fusion = Literal["add_rms_norm", "norm_quant", "grouped_matmul_swiglu", "matmul_all_reduce", "dispatch_ffn_combine"]
Mode = Literal["prefill", "decode"]
MtpWindow = Literal["first", "every"]

# Strongest first.
ORIGINS: tuple[Origin, ...] = get_args(Origin)
FAMILIES: tuple[Family, ...] = get_args(Family)
FUSIONS: frozenset[str] = frozenset(get_args(Fusion))
MODES: tuple[Mode, ...] = get_args(Mode)
MOST_LAYERS = 5


def weakest(origins: Iterable[Origin]) -> Origin:
    """The origin of a sum, which is as good as its weakest part; a sum of nothing is `measured`."""
    return max(origins, key=ORIGINS.index, default=ORIGINS[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The time of an op: `launch_s` plus the longest of its parts, each at a fraction of the device's peak.

    `gather_efficiency` is the fraction of memory bandwidth that reads of scattered rows reach.
    """

    kind: Literal["roofline"]
    launch_s: float
    compute_efficiency: float
    vector_efficiency: float
    memory_efficiency: float
    gather_efficiency: float
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    launch_s: float
    link_efficiency: float
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """How well the stack reads separate rows of host memory: `row_efficiency` as in a device's `host_link`."""

    row_efficiency: float
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One serving stack.

    vendor: of the devices that it is for; None where it is for all.
    fusions: the fused ops it has, of `FUSIONS`.
    curves: by op family, with `default` for the families that have none of their own; see `curve`.
    host_s_per_step, host_origins: host time by mode (prefill, decode) that no device work hides.
    prefill_floor_s_per_layer: what the host needs to launch a layer of a prefill, the least that it takes.
    mtp_window: the MTP draft calls that process the whole window of k + 1 tokens: all of them, or only the first.
    quantized_dispatch: whether tokens travel to the experts in the experts' activation format, or in bf16.
    unquantized: linear weights that stay in bf16 when linear layers are quantised to INT8 or INT4.
    communication_buffer_bytes: per device, whatever the parallelism.
    prompt_hidden_states: hidden states of the whole prompt, in bf16, that a prefill holds at once beside the
        activations of the tokens that the rank computes; 0 where the file does not say.
    host_rows: None where what the device says is taken.
    fits: kernels that are fitted to measurements, by their names; they go before curves.
    serving: None where the file does not say how the stack serves.
    sources: each section of the file to its source.
    """

    name: str
    description: str
    vendor: Vendor | None = None
    fusions: frozenset[str]
    curves: Mapping[str, Curve] = field(hash=False)
    collectives: CollectiveCost
    host_s_per_step: Mapping[str, float] = field(hash=False)
    host_origins: Mapping[str, Origin] = field(hash=False)
    mtp_window: MtpWindow
    quantized_dispatch: bool
    unquantized: tuple[str, ...]
    communication_buffer_bytes: int
    prompt_hidden_states: float = 0.0
    prefill_floor_s_per_layer: float = 0.0
    host_rows: HostRows | None = None
    fits: Mapping[str, Fit] = field(default_factory=dict, hash=False)
    serving: ServingCost | None = None
    sources: Mapping[str, str] = field(hash=False)

    def curve(self, family: str) -> Curve:
        assert family in FAMILIES, f"{family!r} is not an op family"
        return self.curves.get(family, self.curves["default"])


def load_backend(name_or_path: str, device: str | None = None) -> Backend:
    """A shipped backend by its exact name, or a backend file by its path; raises `CastoffError`.

    device: by name, the one whose fits and host times are wanted; without it there are no fits. A file that was fitted
    on one device is refused on another.
    """
    # What ships does not change while a process runs; a user's file may.
    return _shipped(name_or_path, device) if name_or_path in shipped_backends() else _loaded(name_or_path, device)


@cache
def _shipped(name: str, device: str | None) -> Backend:
    return _loaded(name, device)


def _loaded(name_or_path: str, device: str | None) -> Backend:
    backend = _read_backend(_with_fits_of_others(_stacked(_layers(name_or_path, device)), device))
    if backend.serving is None or device is None:
        return backend
    system = backend.serving.system(device)
    host_s = {**backend.host_s_per_step, "decode": system.host_s_per_decode_step}
    prefill = weakest([backend.host_origins["prefill"], system.origin])
    return replace(
        backend,
        host_s_per_step=host_s,
        prefill_floor_s_per_layer=system.prefill_floor_s_per_layer,
        host_origins={"prefill": prefill, "decode": system.origin},
    )


def as_assumed(backend: Backend) -> Backend:
    """The same where nobody measured it: every figure is assumed."""
    host_rows = backend.host_rows
    return replace(
        backend,
        curves={family: replace(curve, origin="assumed") for family, curve in backend.curves.items()},
        collectives=replace(backend.collectives, origin="assumed"),
        host_origins=dict.fromkeys(MODES, "assumed"),
        host_rows=None if host_rows is None else replace(host_rows, origin="assumed"),
    )


def backend_fits(name_or_path: str) -> dict[str, Mapping[str, Fit]]:
    """All fits of a backend by the device that they hold on: those of its file, or those that come with castoff."""
    return {device: load_backend(name_or_path, device).fits for device in _fit_devices(name_or_path)}


def _fit_devices(name_or_path: str) -> tuple[str, ...]:
    own = fitted_device(name_or_path)
    return shipped_fit_devices(name_or_path) if own is None else (own,)


def fitted_device(name_or_path: str) -> str | None:
    """The device that a backend file was fitted on, itself or by what it extends; None where it is for all."""
    layers = [layer for layer in _layers(name_or_path, None) if "device" in layer.values]
    return layers[-1].text("device") if layers else None


def _layers(name_or_path: str, device: str | None, depth: int = 1) -> list[Table]:
    """A backend's file after those that it extends, each followed by the fits that are shipped for it."""
    if name_or_path in shipped_backends():
        return list(_shipped_layers(name_or_path, device, depth))
    return _read_layers(name_or_path, device, depth)


@cache
def _shipped_layers(name: str, device: str | None, depth: int) -> tuple[Table, ...]:
    return tuple(_read_layers(name, device, depth))


def _read_layers(name_or_path: str, device: str | None, depth: int) -> list[Table]:
    table = read_toml(find_toml("backend", name_or_path))
    below = []
    if "extends" in table.values:
        if depth == MOST_LAYERS:
            raise table.fault("extends", f"leads through more than {MOST_LAYERS} files")
        below = _layers(table.text("extends"), device, depth + 1)
    fitted_on = table.text("device") if "device" in table.values else None
    if fitted_on is not None and device not in (None, fitted_on):
        raise table.fault("device", f"is {fitted_on}: its fits do not hold on {device}")
    if _has_own_fits(table) and not any("device" in layer.values for layer in (*below, table)):
        raise table.fault("device", "is missing: it is the one that the file's [fits] hold on")
    shipped = None if device is None else shipped_fits(name_or_path, device)
    if shipped is None:
        return [*below, table]
    return [*below, table, Table(file=str(shipped), values={"fits": read_toml(shipped).values["fits"]})]


def _has_own_fits(table: Table) -> bool:
    fits = table.table("fits") if "fits" in table.values else None
    return fits is not None and any("of" not in fits.table(kernel).values for kernel in fits.values)


@cache
def shipped_backends() -> tuple[str, ...]:
    return shipped_names("backend")


def _stacked(layers: Sequence[Table]) -> Table:
    """Sections of several files, of which later ones replace earlier ones; curves and fits one by one."""
    merged: dict[str, object] = {}
    for layer in layers:
        for key, value in layer.values.items():
            if key in ("curves", "fits"):
                known = merged.get(key, {})
                assert isinstance(known, dict)
                merged[key] = {**known, **layer.table(key).values}
            elif key not in ("extends", "device"):
                merged[key] = value
    return Table(file=next(layer.file for layer in reversed(layers) if "name" in layer.values), values=merged)


def _with_fits_of_others(table: Table, device: str | None) -> Table:
    """Fits that are another backend's, from there; those that it does not have on the device are left out."""
    if "fits" not in table.values:
        return table
    fits: dict[str, object] = {}
    for kernel in table.table("fits").values:
        own = table.table("fits").table(kernel)
        if "of" not in own.values:
            fits[kernel] = own.values
            continue
        own.only(("of",))
        other = own.text("of")
        theirs = _fit_of(other, kernel, device)
        if theirs is None:
            if device is not None and all(_fit_of(other, kernel, each) is None for each in _fit_devices(other)):
                raise own.fault("of", f"must be a backend with a fit of {kernel}, got {shown(other)}")
            continue
        if "of" in theirs.values:
            raise own.fault("of", f"must be a backend with a fit of its own, got {shown(other)}")
        fits[kernel] = theirs.values
    return Table(file=table.file, values={**table.values, "fits": fits})


def _fit_of(name_or_path: str, kernel: str, device: str | None) -> Table | None:
    """What a backend's files say of a kernel's fit on a device."""
    table = _stacked(_layers(name_or_path, device))
    fits = table.table("fits") if "fits" in table.values else None
    return fits.table(kernel) if fits is not None and kernel in fits.values else None


def _read_backend(table: Table) -> Backend:
    table.only(
        (
            "name",
            "description",
            "vendor",
            "stack",
            "host_s_per_step",
            "collectives",
            "host_link",
            "curves",
            "fits",
            "serving",
        )
    )
    stack = table.table("stack")
    held = "prompt_hidden_states"
    stack.only(
        ("fusions", "mtp_window", "quantized_dispatch", "unquantized", "communication_buffer_bytes", held, "source")
    )
    host = table.table("host_s_per_step")
    host.only((*MODES, "origin", "source"))
    collectives = _read_collectives(table.table("collectives"))
    host_rows = _read_host_rows(table.table("host_link")) if "host_link" in table.values else None
    curves = _read_curves(table.table("curves"))
    fits = _read_fits(table.table("fits")) if "fits" in table.values else {}
    serving = read_serving(table.table("serving"), ORIGINS) if "serving" in table.values else None
    return Backend(
        name=table.text("name"),
        description=table.text("description"),
        vendor=table.choice("vendor", get_args(Vendor)) if "vendor" in table.values else None,
        fusions=frozenset(stack.choices("fusions", sorted(FUSIONS))),
        curves=curves,
        collectives=collectives,
        host_s_per_step={mode: host.at_least_zero(mode) for mode in MODES},
        host_origins=dict.fromkeys(MODES, host.choice("origin", ORIGINS)),
        mtp_window=stack.choice("mtp_window", get_args(MtpWindow)),
        quantized_dispatch=stack.flag("quantized_dispatch"),
        unquantized=stack.texts("unquantized"),
        communication_buffer_bytes=stack.count("communication_buffer_bytes", at_least=0),
        prompt_hidden_states=stack.at_least_zero(held) if held in stack.values else 0.0,
        host_rows=host_rows,
        fits=fits,
        serving=serving,
        sources={
            "stack": stack.text("source"),
            "host_s_per_step": host.text("source"),
            "collectives": collectives.source,
            **({} if host_rows is None else {"host_link": host_rows.source}),
            **{f"curves.{family}": curve.source for family, curve in curves.items()},
            **{f"fits.{kernel}": fit.source for kernel, fit in fits.items()},
            **({} if serving is None else serving_sources(serving)),
        },
    )


def _read_collectives(table: Table) -> CollectiveCost:
    table.only(item.name for item in fields(CollectiveCost))
    return CollectiveCost(
        launch_s=table.at_least_zero("launch_s"),
        link_efficiency=table.fraction("link_efficiency"),
        origin=table.choice("origin", ORIGINS),
        source=table.text("source"),
    )


def _read_host_rows(table: Table) -> HostRows:
    table.only(item.name for item in fields(HostRows))
    return HostRows(
        row_efficiency=table.fraction("row_efficiency"),
        origin=table.choice("origin", ORIGINS),
        source=table.text("source"),
    )


def _read_curves(table: Table) -> dict[str, Curve]:
    table.only(("default", *FAMILIES))
    default = table.table("default")
    curves = {"default": _read_curve(default)}
    for family in FAMILIES:
        if family in table.values:
            own = table.table(family)
            # Figures are inherited; where they come from is not.
            own.choice("origin", ORIGINS)
            own.text("source")
            curves[family] = _read_curve(own.over(default))
    return curves


def _read_fits(table: Table) -> dict[str, Fit]:
    return {kernel: read_fit(table.table(kernel)) for kernel in table.values}


def _read_curve(table: Table) -> Curve:
    return _CURVE_READERS[table.choice("kind", tuple(_CURVE_READERS))](table)


def _read_roofline(table: Table) -> Curve:
    table.only(item.name for item in fields(Curve))
    return Curve(
        kind="roofline",
        launch_s=table.at_least_zero("launch_s"),
        compute_efficiency=table.fraction("compute_efficiency"),
        vector_efficiency=table.fraction("vector_efficiency"),
        memory_efficiency=table.fraction("memory_efficiency"),
        gather_efficiency=table.fraction("gather_efficiency"),
        origin=table.choice("origin", ORIGINS),
        source=table.text("source"),
    )


# What a curve may be: the kind that a file names, and its reader.
_CURVE_READERS: Mapping[str, Callable[[Table], Curve]] = {"roofline": _read_roofline}
