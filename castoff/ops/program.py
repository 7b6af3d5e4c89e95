"""Recording a forward pass: abstract tensors, op calls, and the program they make.

`Abstract` stands for a tensor: a shape, a dtype, a memory tier and the recorder it belongs to, no data. An op that is
given one appends an `OpCall` to that recorder's program and returns more of them. Recording has no ambient state:
whoever holds no abstract tensor cannot record.

A program is a schedule of blocks. Layers of one kind are one block that the schedule names many times, so a stack of
78 layers is recorded, and later priced, once per kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import lazy_loader as lazy

from castoff.dims import Dim, product
from castoff.ops.work import DTYPE_BYTES, Work
from castoff.policy.compiled import has_numba

torch = lazy.load("torch")

Tier = Literal["device", "host"]
Kind = Literal["activation", "weight", "cache", "metadata"]
MAIN = "main"

Event = tuple[str, int]
"""A point that a stream has reached: what is done then, and for which layer. A block counts layers from its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Abstract:
    """A tensor without data. Two abstracts with one `value` are views of one buffer."""

    shape: tuple[Dim, ...]
    dtype: str
    recorder: Recorder
    value: int
    kind: Kind = "activation"
    tier: Tier = "device"

    @property
    def elements(self) -> Dim:
        """Number of elements."""
        return product(self.shape)

    @property
    def bytes(self) -> Dim:
        """Size in bytes."""
        return product(self.shape) * DTYPE_BYTES[self.dtype]

    def view(self, *shape: Dim) -> Abstract:
        """The same buffer seen with another shape."""
        return Abstract(shape, self.dtype, self.recorder, self.value, self.kind, self.tier)


Tensor = Any
"""An `Abstract` or a `torch.Tensor`: what ops and model code take and return."""

Shapes = tuple[tuple[tuple[Dim, ...], str], ...]

Observer = Callable[[str], AbstractContextManager[None]]
op_observer: ContextVar[Observer] = ContextVar("op_observer", default=lambda _: nullcontext())
"""Entered around every op that is computed, given its name: how a run times its ops."""


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation: its name, its family (which cost curve), the shapes of its results and its work.

    `shapes(*inputs, **attributes)` gives (shape, dtype) per result; `work(call)` the work of a recorded call;
    `reference(*inputs, **attributes)` computes the results from torch tensors, by the op's definition.
    Inputs are tensors alone; attributes are numbers, words and frozen dataclasses of them.
    outputs: how many results there are when it is computed. mutates: inputs that it writes. opaque: torch.compile must
    not look into the reference, since it depends on data or is a kernel; see `ops/library.py`. kernel: computes the
    same, bit for bit, on an accelerator; cpu_kernel: on a CPU that has numba. The reference does so everywhere else.
    expected: attributes of casts, which say what is expected of data; a computation is not given them.
    """

    name: str
    family: str
    shapes: Callable[..., Shapes]
    work: Callable[[OpCall], Work]
    reference: Callable[..., tuple[Any, ...]] | None = None
    outputs: int = 1
    mutates: tuple[int, ...] = ()
    opaque: bool = False
    kernel: Callable[..., tuple[Any, ...]] | None = None
    cpu_kernel: Callable[..., tuple[Any, ...]] | None = None
    expected: tuple[str, ...] = ()

    def __call__(self, *inputs: Tensor | None, **attributes: Any) -> tuple[Any, ...]:
        """Record the call where the inputs are abstract, compute it where they are real, and return the results."""
        for value in inputs:
            if isinstance(value, Abstract):
                return value.recorder.record(self, inputs, attributes)
        if self.reference is None:
            raise NotImplementedError(f"{self.name} can be cast, and cannot be run yet")
        for name in self.expected:
            attributes.pop(name, None)
        if torch.compiler.is_compiling():
            return call_registered(self, inputs, attributes) if self.opaque else self.compute(*inputs, **attributes)
        # A name in torch's profiler, the same as in a cast.
        with torch.profiler.record_function(self.name), op_observer.get()(self.name):
            return self.compute(*inputs, **attributes)

    def compute(self, *inputs: Tensor | None, **attributes: Any) -> tuple[Any, ...]:
        """The results of real tensors, by the kernel for where they are, or by the reference."""
        assert self.reference is not None
        compute = self.reference
        if any(x is not None and not x.is_cpu for x in inputs):
            compute = self.kernel or self.reference
        elif self.cpu_kernel is not None and has_numba():
            compute = self.cpu_kernel
        return compute(*inputs, **attributes)


def call_registered(op: Op, inputs: tuple[Tensor | None, ...], attributes: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """Call `op` as the torch.library op that `ops.library.register` made of it."""
    read = [None if index in op.mutates else value for index, value in enumerate(inputs)]
    outputs = getattr(torch.ops.castoff, op.name)(read, [inputs[index] for index in op.mutates], literal(attributes))
    return (outputs,) if op.outputs == 1 else tuple(outputs or ())


def literal(value: Any) -> str:
    """Attributes as JSON; a dataclass is an object with its name under `class`. Plain enough for torch.compile."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return '"' + value + '"'
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join([literal(item) for item in value]) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join([literal(key) + ": " + literal(item) for key, item in value.items()]) + "}"
    names = type(value).__dataclass_fields__
    return literal({"class": type(value).__name__, **{name: getattr(value, name) for name in names}})


@dataclass(slots=True, eq=False)
class OpCall:
    """One recorded call. `attributes` are what the op was given beside tensors.

    waits: events that it comes after. signals: events that come after it.
    """

    op: Op
    inputs: tuple[Abstract | None, ...]
    outputs: tuple[Abstract, ...]
    attributes: Mapping[str, Any]
    stream: str
    waits: tuple[Event, ...] = ()
    signals: tuple[Event, ...] = ()
    _work: Work | None = None

    @property
    def work(self) -> Work:
        """What the call must do, worked out once."""
        if self._work is None:
            self._work = self.op.work(self)
        return self._work

    def with_work(self, work: Work) -> OpCall:
        """The same call as if that were all it had to do."""
        op = replace(self.op, work=lambda _: work)
        return OpCall(op, self.inputs, self.outputs, self.attributes, self.stream)

    @property
    def family(self) -> str:
        """Cost-curve family; ops that cost differently in prefill and decode carry the phase."""
        phase = self.attributes.get("phase")
        return f"{self.op.family}_{phase}" if phase else self.op.family

    def tensor(self, index: int) -> Abstract:
        """Input `index`, which the caller knows to be present."""
        value = self.inputs[index]
        assert value is not None, f"{self.op.name}: input {index} is missing"
        return value

    @property
    def input_shapes(self) -> tuple[tuple[Dim, ...], ...]:
        """Shapes of the inputs that are present."""
        return tuple(value.shape for value in self.inputs if value is not None)


@dataclass(slots=True, eq=False)
class Block:
    """Calls that the schedule repeats: one layer kind, the embedding, the head, one MTP draft call."""

    key: str
    inputs: tuple[Abstract | None, ...]
    outputs: tuple[Abstract | None, ...] = ()
    calls: list[OpCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One entry of the schedule: which block, under which label, for which layer, on which values, in which stage."""

    block: Block
    label: str
    layer: int
    stage: int
    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


@dataclass(slots=True)
class Program:
    """What one step does, in order."""

    schedule: list[BlockCall] = field(default_factory=list)

    @property
    def blocks(self) -> list[Block]:
        """The distinct blocks, in order of first use."""
        return list(self.counts)

    @property
    def counts(self) -> dict[Block, int]:
        """How often the step runs each block, in order of first use."""
        return dict(Counter(entry.block for entry in self.schedule))

    def calls(self) -> Iterator[tuple[BlockCall, OpCall]]:
        """Every op call of the step, repeats included, in program order."""
        for entry in self.schedule:
            for call in entry.block.calls:
                yield entry, call

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams in use, main first."""
        return tuple(dict.fromkeys([MAIN, *(call.stream for block in self.blocks for call in block.calls)]))


class Recorder:
    """Builds a `Program`.

    repeat: record equal blocks once (the default); False records every block anew, which must not change any total.
    """

    def __init__(self, *, repeat: bool = True) -> None:
        self.program = Program()
        self._repeat = repeat
        self._by_key: dict[str, Block] = {}
        self._current: Block | None = None
        self._layer = 0
        self._waits: dict[str, list[Event]] = {}
        self._stream = MAIN
        self._stage = 0
        self._values = 0

    def tensor(self, *shape: Dim, dtype: str = "bf16", kind: Kind = "activation", tier: Tier = "device") -> Abstract:
        """A new abstract tensor."""
        self._values += 1
        return Abstract(shape, dtype, self, self._values, kind, tier)

    def record(
        self, op: Op, inputs: tuple[Abstract | None, ...], attributes: Mapping[str, Any]
    ) -> tuple[Abstract, ...]:
        """Append a call of `op` to the block that is being recorded."""
        assert self._current is not None, f"{op.name} was called outside a block"
        outputs = tuple(self.tensor(*shape, dtype=dtype) for shape, dtype in op.shapes(*inputs, **attributes))
        waits = tuple(self._waits.pop(self._stream, ()))
        self._current.calls.append(OpCall(op, inputs, outputs, attributes, self._stream, waits))
        return outputs

    def wait(self, event: Event) -> None:
        """What is called on this stream from here on starts after an event; at once where it never came up."""
        name, layer = event
        self._waits.setdefault(self._stream, []).append((name, layer - self._layer))

    def signal(self, event: Event) -> None:
        """The event comes when all that this block has called on this stream is done."""
        assert self._current is not None, f"{event} is signalled outside a block"
        name, layer = event
        last = next((call for call in reversed(self._current.calls) if call.stream == self._stream), None)
        assert last is not None, f"{event} comes before any call on {self._stream}"
        last.signals += ((name, layer - self._layer),)

    @contextmanager
    def on_stream(self, stream: str) -> Iterator[None]:
        """Calls inside run on `stream`; they start when their inputs are ready."""
        previous, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = previous

    def next_stage(self) -> None:
        """Blocks from here on belong to the next pipeline stage."""
        self._stage += 1

    def block(
        self,
        key: str,
        label: str,
        body: Callable[..., tuple[Abstract | None, ...]],
        *inputs: Abstract | None,
        layer: int = 0,
    ) -> tuple[Abstract | None, ...]:
        """Run `body(*inputs)` as a block, or repeat the block recorded under `key`.

        key: must name everything that decides the body's ops and dims, and which layers its events are of, seen from
        `layer`. label: what this entry is called in a trace.
        """
        known = self._by_key.get(key) if self._repeat else None
        if known is None:
            assert self._current is None, "blocks do not nest"
            known = self._current = Block(key, inputs)
            self._layer = layer
            try:
                known.outputs = body(*inputs)
            finally:
                self._current = None
            assert not self._waits, f"{key} ends with waits for {self._waits}"
            self._by_key[key] = known
            outputs = known.outputs
        else:
            outputs = self._repeat_outputs(known, inputs)
        self.program.schedule.append(BlockCall(known, label, layer, self._stage, _values(inputs), _values(outputs)))
        return outputs

    def _repeat_outputs(self, block: Block, inputs: tuple[Abstract | None, ...]) -> tuple[Abstract | None, ...]:
        passed = {
            formal.value: actual
            for formal, actual in zip(block.inputs, inputs, strict=True)
            if formal is not None and actual is not None
        }
        return tuple(
            None if formal is None else passed.get(formal.value) or self.tensor(*formal.shape, dtype=formal.dtype)
            for formal in block.outputs
        )


def on_stream(x: Tensor, stream: str) -> AbstractContextManager[None]:
    """Calls inside run on a stream of their own where x is abstract; real tensors stay on the current one."""
    return x.recorder.on_stream(stream) if isinstance(x, Abstract) else nullcontext()


_TORCH_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8": "float8_e4m3fn",
    "int8": "int8",
    "int32": "int32",
}


_OWN_NAMES = {torch_name: own for own, torch_name in _TORCH_NAMES.items()}


def dtype_name(x: Tensor) -> str:
    """castoff's name of a tensor's dtype."""
    if isinstance(x, Abstract):
        return x.dtype
    return _OWN_NAMES[str(x.dtype).removeprefix("torch.")]


def torch_dtype(name: str) -> Any:
    """torch's dtype of castoff's name."""
    return getattr(torch, _TORCH_NAMES[name])


def _values(tensors: tuple[Abstract | None, ...]) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else tensor.value for tensor in tensors)
