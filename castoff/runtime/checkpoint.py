"""Weights with real numbers: from a Hugging Face checkpoint, or random from a seed.

A rank reads only its slices. Checkpoints store the experts of a layer one by one and gate and up apart; castoff stacks
them.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.setup import Setup
from castoff.model.shards import Cut, held_shape, rank_cuts
from castoff.model.weights import Parameter, layer_parameters, outer_parameters, parameter_format
from castoff.ops.linear import Weight
from castoff.ops.program import Tensor, torch_dtype
from castoff.runtime.stored import (
    PLAIN_DTYPES,
    QUANTIZED_DTYPES,
    SCALE_DTYPES,
    SCALE_SUFFIXES,
    WHOLE,
    Part,
    Piece,
    TensorSource,
    read_plain,
    read_quantized,
    scale_shapes,
)
from castoff.spec.model import ModelSpec
from castoff.spec.quant import FP8_BLOCK, LinearFormat

torch = lazy.load("torch")
safetensors = lazy.load("safetensors")

INITIALIZER_RANGE = 0.02
INDEX_FILE = "model.safetensors.index.json"


def rank_parts(parameter: Parameter, prefix: str, cuts: Sequence[Cut]) -> list[list[tuple[Piece, Part]]]:
    """What this rank reads of a parameter's tensors, arranged as in `checkpoint_pieces`: none of other ranks' experts.

    Gate and up are cut each for itself.
    """
    stacked = checkpoint_pieces(parameter, prefix)
    is_stacked = len(parameter.shape) == 3
    by_axis = {cut.axis - is_stacked: cut for cut in cuts}
    if -1 in by_axis:
        start, end = by_axis[-1].span(len(stacked))
        stacked = stacked[start:end]
    return [[(piece, _part(piece, by_axis)) for piece in pieces] for pieces in stacked]


def _part(piece: Piece, by_axis: Mapping[int, Cut]) -> Part:
    spans = [by_axis[axis].span(size) if axis in by_axis else None for axis, size in enumerate(piece.shape)]
    return Part(*spans)


def checkpoint_pieces(parameter: Parameter, prefix: str) -> list[list[Piece]]:
    """The tensors that make up a parameter: one list per stacked expert (or one), each joined along the first axis.

    prefix: `model.layers.3.`, or nothing.
    """
    base, shape = prefix + parameter.name, parameter.shape
    # Published FP8 checkpoints quantise kv_b too, which is held in bf16.
    quantizable = parameter.role in ("linear", "expert") or base.endswith(".kv_b_proj")
    if ".experts." in base and "shared" not in base:
        stem, projection = base.rsplit(".", 1)
        experts, rows, columns = shape
        return [
            [
                Piece(f"{stem}.{expert}.{name}.weight", (count, columns), quantizable)
                for name, count in _projections(projection, rows)
            ]
            for expert in range(experts)
        ]
    if base.endswith("gate_up_proj"):
        stem = base.removesuffix("gate_up_proj")
        return [
            [
                Piece(f"{stem}{name}.weight", (count, shape[1]), quantizable)
                for name, count in _projections("gate_up_proj", shape[0])
            ]
        ]
    name = base if base.endswith((".bias", "e_score_correction_bias")) else f"{base}.weight"
    return [[Piece(name, shape, quantizable)]]


def _projections(name: str, rows: int) -> list[tuple[str, int]]:
    return [("gate_proj", rows // 2), ("up_proj", rows // 2)] if name == "gate_up_proj" else [(name, rows)]


class Checkpoint:
    """The safetensors files of a directory, opened as they are needed; every fault is named before any is read.

    mtp: whether the MTP blocks must be there; None checks them where the directory has any of their tensors.
    """

    def __init__(self, directory: Path, model: ModelSpec, *, mtp: bool | None) -> None:
        self._directory = directory
        self._files = _file_of_tensor(directory)
        self._open: dict[str, Tensor] = {}
        self._scales: dict[str, Piece] = {}
        first_mtp = f"model.layers.{model.num_hidden_layers}."
        has_mtp = any(name.startswith(first_mtp) for name in self._files) if mtp is None else mtp
        self._check(model, mtp=has_mtp)

    @property
    def files(self) -> Mapping[str, str]:
        """The file of every tensor."""
        return self._files

    def read(self, piece: Piece, part: Part = WHOLE) -> Tensor:
        """A tensor, or part of one, copied out of its file."""
        handle = self._handle(self._files[piece.name])
        if part == WHOLE:
            return handle.get_tensor(piece.name)
        ranges = (part.rows, part.columns)[: len(piece.shape)]
        return handle.get_slice(piece.name)[tuple(slice(*(extent or (None,))) for extent in ranges)]

    def scales(self, piece: Piece) -> Piece | None:
        """The scales that are stored beside a quantised tensor; None beside a plain one."""
        return self._scales.get(piece.name)

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Stored dtype, in safetensors' words, and shape of a tensor."""
        try:
            found = self._handle(self._files[name]).get_slice(name)
        except safetensors.SafetensorError as error:
            raise CastoffError(f"{self._directory / self._files[name]}: cannot read {name}: {error}") from None
        return found.get_dtype(), tuple(found.get_shape())

    def _handle(self, file: str) -> Tensor:
        if file not in self._open:
            path = self._directory / file
            try:
                self._open[file] = safetensors.safe_open(path, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise CastoffError(f"cannot read {path}: {error}; is the file whole?") from None
        return self._open[file]

    def _check(self, model: ModelSpec, *, mtp: bool) -> None:
        quant = model.checkpoint_quant
        if quant is not None and quant.weight_block_size not in (None, (FP8_BLOCK, FP8_BLOCK)):
            raise CastoffError(
                f"{self._directory}: weight_block_size is {list(quant.weight_block_size or ())}; FP8 weights run in "
                f"blocks of {FP8_BLOCK} by {FP8_BLOCK} only"
            )
        wanted = {piece.name: piece for piece in model_pieces(model, mtp=mtp)}
        missing = [name for name in wanted if name not in self._files]
        if missing:
            raise CastoffError(f"{self._directory}: the checkpoint lacks {_names(missing)}{self._hint(missing, model)}")
        known = {name + suffix for name in wanted for suffix in ("", *SCALE_SUFFIXES.values())}
        unknown = [name for name in self._files if name not in known and not _is_known_extra(name, model)]
        if unknown:
            raise CastoffError(
                f"{self._directory}: the checkpoint has {_names(unknown)}, which {model.name} does not use"
            )
        for piece in wanted.values():
            scales = self._checked(piece, QUANTIZED_DTYPES[quant.action] if quant is not None else None)
            if scales is not None:
                self._scales[piece.name] = scales

    def _checked(self, piece: Piece, quantized: str | None) -> Piece | None:
        """Check a tensor and the scales beside it; returns the scales, None for a plain tensor."""
        dtype, shape = self.header(piece.name)
        if shape != piece.shape:
            raise self._fault(piece, f"has shape {list(shape)}, the config asks for {list(piece.shape)}")
        if dtype in PLAIN_DTYPES:
            scales = None
        elif dtype == quantized and piece.quantizable:
            scales = self._checked_scales(piece, dtype)
        elif dtype in SCALE_SUFFIXES and not piece.quantizable:
            raise self._fault(piece, f"is stored as {dtype}, but it is never quantised: BF16, F16, F32 or F64 is read")
        else:
            kinds = "unquantised weights are read from" if quantized is None else f"weights are read from {quantized},"
            raise self._fault(piece, f"is stored as {dtype}; {kinds} BF16, F16, F32 or F64")
        for suffix in SCALE_SUFFIXES.values():
            name = piece.name + suffix
            if name in self._files and (scales is None or name != scales.name):
                raise self._fault(piece, f"is stored as {dtype}, but {name} stands beside it")
        return scales

    def _checked_scales(self, piece: Piece, dtype: str) -> Piece:
        name = piece.name + SCALE_SUFFIXES[dtype]
        if name not in self._files:
            raise self._fault(piece, f"is stored as {dtype}, but its scales {name} are missing from the checkpoint")
        found, shape = self.header(name)
        allowed = scale_shapes(piece, dtype)
        if shape not in allowed:
            wanted = " or ".join(str(list(shape)) for shape in allowed)
            raise self._fault(
                piece, f"needs scales of shape {wanted} for its shape {list(piece.shape)}; {name} has {list(shape)}"
            )
        if found not in SCALE_DTYPES:
            raise self._fault(piece, f"has scales {name} stored as {found}; they are read from F32 or BF16")
        return Piece(name, shape)

    def _hint(self, missing: list[str], model: ModelSpec) -> str:
        block = f"model.layers.{model.num_hidden_layers}."
        if any(name.startswith(block) for name in missing):
            return (
                f"; {block}* is the MTP block, which follows the layers: without one, or with "
                "--num-hidden-layers-override, leave out --num-mtp-tokens"
            )
        return ""

    def _fault(self, piece: Piece, problem: str) -> CastoffError:
        return CastoffError(f"{self._directory}: {piece.name} {problem}")


def _names(names: list[str]) -> str:
    shown, more = ", ".join(names[:3]), len(names) - 3
    return f"{shown} and {more} more" if more > 0 else shown


def _is_known_extra(name: str, model: ModelSpec) -> bool:
    """MTP layers, which repeat the embedding and the head, a tied head, and what older exports store of the rotary
    embedding."""
    if name == "lm_head.weight" and model.tie_word_embeddings:
        return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (layer is not None and int(layer[1]) >= model.num_hidden_layers) or name.endswith("rotary_emb.inv_freq")


def _file_of_tensor(directory: Path) -> dict[str, str]:
    index = directory / INDEX_FILE
    single = directory / "model.safetensors"
    if index.exists():
        return _indexed(index)
    if not single.exists():
        raise CastoffError(
            f"{directory} has no weights: neither model.safetensors nor {INDEX_FILE}; "
            "--random-weights SEED runs without any"
        )
    try:
        with safetensors.safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (OSError, safetensors.SafetensorError) as error:
        raise CastoffError(f"cannot read {single}: {error}; is the file whole?") from None


def _indexed(index: Path) -> dict[str, str]:
    """The file of every tensor by an index; each stands beside it."""
    try:
        values = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CastoffError(f"{index} is not a safetensors index: {error}") from None
    files = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise CastoffError(
            f"{index} is not a safetensors index: its weight_map must give the name of a file per tensor"
        )
    for file in dict.fromkeys(files.values()):
        if file != Path(file).name or not (index.parent / file).is_file():
            raise CastoffError(f"{index} names {file!r}, which is no file beside it")
    return files


def model_pieces(model: ModelSpec, *, mtp: bool) -> Iterator[Piece]:
    """Every tensor that a model's checkpoint must have."""
    for name, parameter in outer_parameters(model).items():
        if name == "lm_head" and model.tie_word_embeddings:
            continue
        yield from (piece for pieces in checkpoint_pieces(parameter, "") for piece in pieces)
    for layer in range(model.num_hidden_layers + (model.num_nextn_predict_layers if mtp else 0)):
        for parameter in layer_parameters(model, layer):
            for pieces in checkpoint_pieces(parameter, f"model.layers.{layer}."):
                yield from pieces


class RandomTensors:
    """Normal weights of the usual width, norms of ones, from a seed and a tensor's name alone: ranks need not agree."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def scales(self, piece: Piece) -> Piece | None:
        """None: all are plain."""
        return None

    def read(self, piece: Piece, part: Part = WHOLE) -> Tensor:
        """A tensor that depends on nothing but seed, name and shape, or part of it."""
        rows, columns = (slice(*(extent or (None,))) for extent in (part.rows, part.columns))
        whole = self._whole(piece)
        return whole[rows, columns] if whole.dim() > 1 else whole[rows]

    def _whole(self, piece: Piece) -> Tensor:
        if len(piece.shape) == 1 and piece.name.endswith("norm.weight"):
            return torch.ones(piece.shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {piece.name}".encode()))
        return torch.empty(piece.shape).normal_(std=INITIALIZER_RANGE, generator=generator)


class LoadedWeights:
    """Weights of one rank as torch tensors in the formats of the setup, read once."""

    def __init__(
        self, setup: Setup, source: TensorSource, *, dtype: Tensor, device: Tensor,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        model = setup.model
        layers = model.num_hidden_layers + (1 if setup.mtp.num_mtp_tokens else 0)
        self._setup, self._dtype, self._device, self._source = setup, dtype, device, source
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
        tensors = [held for weight in weights for held in (weight.values, weight.scales) if held is not None]
        return sum({held.data_ptr(): held.nbytes for held in tensors}.values())

    def _tied_head(self, embedding: Parameter, head: Parameter) -> Weight:
        """The embedding as lm_head: the same tensor, unless the two are cut otherwise."""
        mesh = self._setup.mesh
        if rank_cuts(embedding, mesh) == rank_cuts(head, mesh):
            return self._outer["embed_tokens"]
        return self._load(replace(head, name=embedding.name), "", rank_cuts(head, mesh))

    def _load(self, parameter: Parameter, prefix: str, cuts: tuple[Cut, ...] | None = None) -> Weight:
        cuts = rank_cuts(parameter, self._setup.mesh) if cuts is None else cuts
        shape, stacked = held_shape(parameter.shape, cuts), rank_parts(parameter, prefix, cuts)
        form = parameter_format(self._setup, parameter)
        if form is not None and form.has_scales:
            return self._load_quantized(shape, stacked, form)
        # The router's choice is made at no less than fp32.
        wide = torch.promote_types(self._dtype, torch.float32)
        dtype = wide if parameter.role == "router" else self._dtype
        held = torch.empty(shape, dtype=dtype, device=self._device)
        for index, parts in enumerate(stacked):
            target, start = held[index] if len(shape) == 3 else held, 0
            for piece, part in parts:
                values = read_plain(self._source, piece, part)
                target[start : start + values.shape[0]].copy_(values)
                start += values.shape[0]
        return Weight(held)

    def _load_quantized(
        self, shape: tuple[int, ...], stacked: list[list[tuple[Piece, Part]]], form: LinearFormat
    ) -> Weight:
        scales_shape = (*shape[:-2], *form.weight_scales(shape[-2], shape[-1]))
        values = torch.empty(shape, dtype=torch_dtype(form.weight_dtype), device=self._device)
        scales = torch.empty(scales_shape, dtype=torch_dtype(form.scale_dtype), device=self._device)
        for index, parts in enumerate(stacked):
            at = index if len(shape) == 3 else slice(None)
            read_values, read_scales = read_quantized(self._source, parts, form)
            values[at].copy_(read_values)
            scales[at].copy_(read_scales)
        return Weight(values, scales, form)
