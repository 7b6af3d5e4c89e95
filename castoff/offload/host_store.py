"""Host memory for latent rows: how much there is, and how it is taken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.free_memory import available_bytes
from castoff.ops.program import Tensor

torch = lazy.load("torch")


def check_host_bytes(needed_bytes: int, limit_bytes: int | None) -> None:
    """Raise CastoffError where the rows of a run are more than its limit, or than the host's memory has room for.

    needed_bytes: of this process. The others that torchrun started on this machine need as much.
    """
    less = "run fewer or shorter requests at once (--batch, --max-new-tokens)"
    if limit_bytes is not None and needed_bytes > limit_bytes:
        raise CastoffError(
            f"the offloaded KV cache needs {needed_bytes:,} bytes of host memory, and --host-gib allows "
            f"{limit_bytes:,}; give more, or {less}"
        )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free_bytes = available_bytes()
    if free_bytes is not None and needed_bytes * processes > free_bytes:
        each = "" if processes == 1 else f" in each of {processes} processes"
        raise CastoffError(
            f"the offloaded KV cache needs {needed_bytes:,} bytes of host memory{each}, and {free_bytes:,} are free; "
            f"{less}"
        )


def host_rows(shape: tuple[int, ...], dtype: Tensor, device: Tensor) -> Tensor:
    """An uninitialised tensor in host memory, which `device` can read and write by itself unless it is a CPU.

    Raises CastoffError where the system does not give the memory. `release` gives it back.
    """
    try:
        rows = torch.empty(shape, dtype=dtype, pin_memory=device.type not in ("cpu", "cuda"))
    # Torch raises RuntimeError for memory that it cannot have or pin.
    except (RuntimeError, MemoryError) as error:
        raise _not_taken(next((line.strip() for line in str(error).splitlines() if line.strip()), "")) from None
    if device.type == "cuda":
        # Torch's own pinned memory comes in powers of two: up to twice what is asked for.
        failure = torch.cuda.cudart().cudaHostRegister(rows.data_ptr(), rows.nbytes, _PORTABLE_AND_MAPPED)
        if int(failure):
            raise _not_taken(f"pinning it gave CUDA error {int(failure)}")
    return rows


def release(rows: Tensor, device: Tensor) -> None:
    """Let host rows be ordinary memory again; nothing on the device may use them any more."""
    if device.type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(rows.data_ptr())


# cudaHostRegisterPortable | cudaHostRegisterMapped
_PORTABLE_AND_MAPPED = 0x01 | 0x02


def _not_taken(reason: str) -> CastoffError:
    return CastoffError(
        f"host memory for the offloaded KV cache could not be taken: {reason}; run fewer or shorter requests at once "
        "(--batch, --max-new-tokens), or raise the limit on locked memory (ulimit -l)"
    )


@contextmanager
def near(device: Tensor) -> Iterator[None]:
    """Run on the processors next to a device, so that memory touched first inside lies on their NUMA node.

    Does nothing where the system names no node for the device.
    """
    processors = _processors_near(device)
    if not processors:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors & before or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _processors_near(device: Tensor) -> set[int]:
    if device.type != "cuda" or not Path("/sys/bus/pci/devices").is_dir():
        return set()
    found = torch.cuda.get_device_properties(device)
    try:
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text(encoding="ascii"))
        listed = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
    # Virtual machines and older drivers have no such entries; −1 is no node.
    except (OSError, ValueError, AttributeError):
        return set()
    return processors_of(listed)


def processors_of(listed: str) -> set[int]:
    """The numbers in a list such as `0-3,8`."""
    found: set[int] = set()
    for item in listed.strip().split(","):
        first, _, last = item.partition("-")
        if first:
            found |= set(range(int(first), int(last or first) + 1))
    return found
