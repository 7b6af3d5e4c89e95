"""Weights with real numbers: from a Hugging Face checkpoint, or random from a seed.

A rank reads only its slices. Checkpoints store the experts of a layer one by one and gate and up apart; castoff stacks
them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.setup import Setup
from castoff.model.shards import Cut, held_shape, rank_cuts
from castoff.model.weights import Parameter, layer_parameters, outer_parameters
from castoff.ops.linear import Weight
from castoff.ops.program import Tensor
from castoff.spec.model import ModelSpec

torch = lazy.load("torch")
safetensors = lazy.load("safetensors")

INITIALIZER_RANGE = 0.02


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint: its name and whole shape. window: start and end of what is read, along each axis;
    None reads the whole."""

    name: str
    shape: tuple[int, ...]
    window: tuple[tuple[int, int], ...] | None = None

    @property
    def slices(self) -> tuple[slice, ...]:
        """The window as an index."""
        return tuple(slice(*span) for span in self.window or ())


def rank_pieces(parameter: Parameter, prefix: str, cuts: Sequence[Cut]) -> list[list[Piece]]:
    """What this rank reads of a parameter's tensors, arranged as in `checkpoint_pieces`: none of other ranks' experts.

    Gate and up are cut each for itself.
    """
    stacked = checkpoint_pieces(parameter, prefix)
    is_stacked = len(parameter.shape) == 3
    by_axis = {cut.axis - is_stacked: cut for cut in cuts}
    if -1 in by_axis:
        start, end = by_axis[-1].span(len(stacked))
        stacked = stacked[start:end]
    return [[_cut(piece, by_axis) for piece in pieces] for pieces in stacked]


def _cut(piece: Piece, by_axis: Mapping[int, Cut]) -> Piece:
    if not any(axis in by_axis for axis in range(len(piece.shape))):
        return piece
    spans = [by_axis[axis].span(size) if axis in by_axis else (0, size) for axis, size in enumerate(piece.shape)]
    return replace(piece, window=tuple(spans))


def checkpoint_pieces(parameter: Parameter, prefix: str) -> list[list[Piece]]:
    """The tensors that make up a parameter: one list per stacked expert (or one), each joined along the first axis.

    prefix: `model.layers.3.`, or nothing.
    """
    base, shape = prefix + parameter.name, parameter.shape
    if ".experts." in base and "shared" not in base:
        stem, projection = base.rsplit(".", 1)
        experts, rows, columns = shape
        return [
            [
                Piece(f"{stem}.{expert}.{name}.weight", (count, columns))
                for name, count in _projections(projection, rows)
            ]
            for expert in range(experts)
        ]
    if base.endswith("gate_up_proj"):
        stem = base.removesuffix("gate_up_proj")
        return [
            [Piece(f"{stem}{name}.weight", (count, shape[1])) for name, count in _projections("gate_up_proj", shape[0])]
        ]
    name = base if base.endswith((".bias", "e_score_correction_bias")) else f"{base}.weight"
    return [[Piece(name, shape)]]


def _projections(name: str, rows: int) -> list[tuple[str, int]]:
    return [("gate_proj", rows // 2), ("up_proj", rows // 2)] if name == "gate_up_proj" else [(name, rows)]


class TensorSource(Protocol):
    """Where tensors come from."""

    def read(self, piece: Piece) -> Tensor:
        """The tensor of that name and shape, or the window of it."""


class Checkpoint:
    """The safetensors files of a directory, opened as they are needed; every fault is named before any is read."""

    def __init__(self, directory: Path, model: ModelSpec, *, mtp: bool) -> None:
        self._directory = directory
        self._files = _file_of_tensor(directory)
        self._open: dict[str, Tensor] = {}
        self._check(model, mtp=mtp)

    def read(self, piece: Piece) -> Tensor:
        """One tensor, copied out of its file; of a window, nothing else is read."""
        handle = self._handle(self._files[piece.name])
        return handle.get_tensor(piece.name) if piece.window is None else handle.get_slice(piece.name)[piece.slices]

    def _handle(self, file: str) -> Tensor:
        if file not in self._open:
            path = self._directory / file
            try:
                self._open[file] = safetensors.safe_open(path, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise CastoffError(f"cannot read {path}: {error}") from None
        return self._open[file]

    def _check(self, model: ModelSpec, *, mtp: bool) -> None:
        wanted = {piece.name: piece.shape for piece in model_pieces(model, mtp=mtp)}
        missing = [name for name in wanted if name not in self._files]
        if missing:
            raise CastoffError(f"{self._directory}: {_names(missing)} missing from the checkpoint")
        unknown = [name for name in self._files if name not in wanted and not _is_known_extra(name, model)]
        if unknown:
            raise CastoffError(
                f"{self._directory}: the checkpoint has {_names(unknown)}, which {model.name} does not use"
            )
        for name, shape in wanted.items():
            try:
                found = self._handle(self._files[name]).get_slice(name)
            except safetensors.SafetensorError as error:
                raise CastoffError(f"{self._directory / self._files[name]}: cannot read {name}: {error}") from None
            if tuple(found.get_shape()) != shape:
                raise CastoffError(
                    f"{self._directory}: {name} has shape {list(found.get_shape())}, the config asks for {list(shape)}"
                )
            if found.get_dtype() not in ("BF16", "F16", "F32", "F64"):
                raise CastoffError(
                    f"{self._directory}: {name} is stored as {found.get_dtype()}; unquantised weights are read from "
                    "BF16, F16, F32 or F64"
                )


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more tensors are" if len(names) > 3 else f"{shown}"


def _is_known_extra(name: str, model: ModelSpec) -> bool:
    """MTP layers, which repeat the embedding and the head, and what older exports store of the rotary embedding."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (layer is not None and int(layer[1]) >= model.num_hidden_layers) or name.endswith("rotary_emb.inv_freq")


def _file_of_tensor(directory: Path) -> dict[str, str]:
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.exists():
        try:
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CastoffError(f"{index} is not a safetensors index: {error}") from None
        return files
    if not single.exists():
        raise CastoffError(
            f"{directory} has no weights: neither model.safetensors nor model.safetensors.index.json; "
            "--random-weights SEED runs without any"
        )
    try:
        with safetensors.safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (OSError, safetensors.SafetensorError) as error:
        raise CastoffError(f"cannot read {single}: {error}") from None


def model_pieces(model: ModelSpec, *, mtp: bool) -> Iterator[Piece]:
    """Every tensor that a model's checkpoint must have."""
    for name, parameter in outer_parameters(model).items():
        if name == "lm_head" and model.tie_word_embeddings:
            continue
        yield from (piece for pieces in checkpoint_pieces(parameter, "") for piece in pieces)
    for layer in range(model.num_hidden_layers + (1 if mtp else 0)):
        for parameter in layer_parameters(model, layer):
            for pieces in checkpoint_pieces(parameter, f"model.layers.{layer}."):
                yield from pieces


class RandomTensors:
    """Normal weights of the usual width, norms of ones, from a seed and a tensor's name alone: ranks need not agree."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def read(self, piece: Piece) -> Tensor:
        """A tensor that depends on nothing but seed, name and shape; it is drawn whole, whatever the window."""
        if len(piece.shape) == 1 and piece.name.endswith("norm.weight"):
            return torch.ones(piece.shape)[piece.slices]
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {piece.name}".encode()))
        return torch.empty(piece.shape).normal_(std=INITIALIZER_RANGE, generator=generator)[piece.slices]


class LoadedWeights:
    """Weights of one rank as torch tensors, unquantised, read once."""

    def __init__(
        self, setup: Setup, source: TensorSource, *, dtype: Tensor, device: Tensor,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        model = setup.model
        layers = model.num_hidden_layers + (1 if setup.mtp.num_mtp_tokens else 0)
        self._dtype, self._device, self._source = dtype, device, source
        self._mesh = setup.mesh
        progress("embedding and head")
        outer = outer_parameters(model)
        tied = model.tie_word_embeddings
        self._outer = {
            name: self._load(parameter, "") for name, parameter in outer.items() if name != "lm_head" or not tied
        }
        if tied:
            self._outer["lm_head"] = self._tied_head(outer["embed_tokens"], outer["lm_head"])
        self._layers = []
        for layer in range(layers):
            progress(f"layer {layer + 1} of {layers}")
            prefix = f"model.layers.{layer}."
            self._layers.append(
                {parameter.name: self._load(parameter, prefix) for parameter in layer_parameters(model, layer)}
            )

    def layer(self, layer: int) -> Mapping[str, Weight]:
        """Weights of a layer by relative name."""
        return self._layers[layer]

    def outer(self) -> Mapping[str, Weight]:
        """embed_tokens, norm and lm_head."""
        return self._outer

    @property
    def bytes(self) -> int:
        """Bytes of all weights."""
        weights = [weight for held in (self._outer, *self._layers) for weight in held.values()]
        # A tied head is the embedding.
        return sum({weight.values.data_ptr(): weight.values.nbytes for weight in weights}.values())

    def _tied_head(self, embedding: Parameter, head: Parameter) -> Weight:
        """The embedding as lm_head: the same tensor, unless the two are cut otherwise."""
        if rank_cuts(embedding, self._mesh) == rank_cuts(head, self._mesh):
            return self._outer["embed_tokens"]
        return self._load(replace(head, name=embedding.name), "", rank_cuts(head, self._mesh))

    def _load(self, parameter: Parameter, prefix: str, cuts: tuple[Cut, ...] | None = None) -> Weight:
        cuts = rank_cuts(parameter, self._mesh) if cuts is None else cuts
        # The router's choice is made at no less than fp32.
        wide = torch.promote_types(self._dtype, torch.float32)
        dtype = wide if parameter.role == "router" else self._dtype
        held = torch.empty(held_shape(parameter.shape, cuts), dtype=dtype, device=self._device)
        for index, pieces in enumerate(rank_pieces(parameter, prefix, cuts)):
            target, start = held[index] if len(parameter.shape) == 3 else held, 0
            for piece in pieces:
                values = self._source.read(piece)
                target[start : start + values.shape[0]].copy_(values)
                start += values.shape[0]
        return Weight(held)
