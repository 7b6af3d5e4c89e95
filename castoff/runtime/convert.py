"""`castoff convert`: a checkpoint in, the same checkpoint with quantised linear layers out, file by file.

What a run would quantise on reading is quantised, by the same code; all else is copied. A finished file has its own
name, one being written a temporary one, and config.json comes last: an interrupted conversion is no checkpoint, and the
same command goes on with it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.setup import Setup
from castoff.model.weights import layer_parameters, outer_parameters, parameter_format
from castoff.ops.program import Tensor
from castoff.runtime.checkpoint import INDEX_FILE, Checkpoint, checkpoint_pieces
from castoff.runtime.safetensors_file import TEMPORARY_PREFIX, Contents, is_whole, replacing, shard_bytes, write_shard
from castoff.runtime.stored import (
    QUANTIZED_DTYPES,
    SCALE_SUFFIXES,
    WHOLE,
    Piece,
    read_plain,
    read_quantized,
    scale_shapes,
)
from castoff.runtime.structure import run_setup
from castoff.spec.checkpoint_quant import quantization_config
from castoff.spec.model import ModelSpec, load_model, raw_config
from castoff.spec.quant import LinearAction, LinearFormat
from castoff.spec.scenario import Quant, Scenario

torch = lazy.load("torch")

STATE_FILE = f"{TEMPORARY_PREFIX}convert.json"
"""What a conversion that is not finished was begun from and for."""
_CONFIG = "config.json"
_COPIED = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
    "*.py",
)
_PLAIN_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """A finished conversion. kept_shards: files that an earlier attempt had finished. size_bytes: of all weights."""

    directory: Path
    action: LinearAction
    shards: int
    kept_shards: int
    quantized: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor of the source and what becomes of it. form: None for what is written plain, in dtype."""

    piece: Piece
    form: LinearFormat | None
    dtype: str

    @property
    def contents(self) -> Contents:
        """The tensors that are written."""
        name, shape = self.piece.name, self.piece.shape
        if self.form is None:
            return {name: (self.dtype, shape)}
        scales = scale_shapes(self.piece, self.dtype)[0]
        return {name: (self.dtype, shape), name + SCALE_SUFFIXES[self.dtype]: ("F32", scales)}

    def tensors(self, checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
        """The same with their values."""
        name = self.piece.name
        if self.form is None:
            values = read_plain(checkpoint, self.piece)
            # What was plain is copied; what was quantised and is no more has the model's dtype.
            yield name, values if checkpoint.scales(self.piece) is None else values.to(_torch_dtype(self.dtype))
            return
        values, scales = read_quantized(checkpoint, [(self.piece, WHOLE)], self.form)
        yield name, values
        yield name + SCALE_SUFFIXES[self.dtype], scales


@dataclass(frozen=True, slots=True)
class _Shard:
    """A file of the target."""

    name: str
    items: tuple[_Item, ...]

    @property
    def contents(self) -> Contents:
        """The tensors of the file."""
        return {name: entry for item in self.items for name, entry in item.contents.items()}


def convert(
    model: str, action: LinearAction, output: Path, *, progress: Callable[[str], None] = lambda _: None
) -> ConvertReport:
    """Write the checkpoint in the directory `model` to the directory `output`, its linear layers quantised.

    Raises CastoffError for formats that are not written, a checkpoint that is not whole, an output that holds anything
    but this conversion's own files, and too small a disk.
    """
    source = Path(model)
    spec = _check(source, action, output)
    checkpoint = Checkpoint(source, spec, mtp=None)
    shards = _plan(checkpoint, _setup(spec, action), action)
    copied = sorted({path for pattern in _COPIED for path in source.glob(pattern) if path.is_file()})
    state = _state(source, action, checkpoint)
    _check_names(shards, {path.name for path in copied})
    own = {shard.name for shard in shards} | {path.name for path in copied} | {INDEX_FILE, _CONFIG, STATE_FILE}
    _check_output(output, state, own)
    todo = {shard.name: shard for shard in shards if not is_whole(output / shard.name, shard.contents)}
    sizes = [shard_bytes(shard.contents) for shard in todo.values()]
    _check_space(output, sum(sizes) + sum(path.stat().st_size for path in copied))
    _begin(output, state)
    for number, shard in enumerate(shards, start=1):
        if shard.name in todo:
            _write(shard, checkpoint, output, f"file {number} of {len(shards)}", progress)
    for path in copied:
        with path.open("rb") as file, replacing(output / path.name) as target:
            shutil.copyfileobj(file, target)
    _finish(source, action, output, shards)
    return ConvertReport(
        directory=output,
        action=action,
        shards=len(shards),
        kept_shards=len(shards) - len(todo),
        quantized=sum(item.form is not None for shard in shards for item in shard.items),
        size_bytes=sum(shard_bytes(shard.contents) for shard in shards),
    )


def _check(source: Path, action: LinearAction, output: Path) -> ModelSpec:
    if action not in QUANTIZED_DTYPES:
        raise CastoffError(
            f"--quantize-linear-action {action} can be cast, not converted; convert writes "
            f"{' or '.join(QUANTIZED_DTYPES)}"
        )
    try:
        torch.get_default_dtype()
    except ModuleNotFoundError:
        raise CastoffError("converting needs torch: pip install 'castoff[run]'") from None
    if not source.is_dir():
        raise CastoffError(f"{source} is no directory; give the directory of a checkpoint with its config.json")
    try:
        output.resolve()
    # A symlink loop, or a path that no file system allows.
    except (OSError, RuntimeError, ValueError) as error:
        raise CastoffError(f"cannot write to -o {str(output)!r}: {error}") from None
    if output.is_symlink() and not output.exists():
        raise CastoffError(f"-o {output} is a link to nothing; give a directory")
    if output.resolve() == source.resolve():
        raise CastoffError(f"-o {output} is the checkpoint itself; give another directory")
    if output.exists() and not output.is_dir():
        raise CastoffError(f"-o {output} is a file; give a directory")
    if not output.resolve().parent.is_dir():
        raise CastoffError(f"-o {output}: there is no directory {output.resolve().parent}")
    spec = load_model(str(source))
    if spec.checkpoint_quant is not None and spec.checkpoint_quant.action == action:
        raise CastoffError(f"{source} is stored in {action} already; castoff run takes it as it is")
    return spec


def _setup(spec: ModelSpec, action: LinearAction) -> Setup:
    """The structure in which `castoff run` would read the target: what it keeps in bf16 is not quantised."""
    return run_setup(spec, Scenario(quant=Quant(quantize_linear_action=action)))


def _plan(checkpoint: Checkpoint, setup: Setup, action: LinearAction) -> tuple[_Shard, ...]:
    """The files of the target: each has the tensors of the source's file of that name, and scales beside their
    weights; a file that held nothing but scales is left out."""
    forms = _forms(setup)
    shards: dict[str, list[_Item]] = {}
    dropped = {scales.name for piece, _ in forms.values() if (scales := checkpoint.scales(piece)) is not None}
    for name in sorted(checkpoint.files.keys() - dropped):
        stored, shape = checkpoint.header(name)
        # The copies of embedding and head in MTP blocks, and older exports' rotary tables, are no parameters.
        piece, form = forms.get(name, (Piece(name, shape), None))
        dtype = QUANTIZED_DTYPES[action] if form is not None else stored
        if form is None and checkpoint.scales(piece) is not None:
            dtype = _PLAIN_DTYPES[setup.model.dtype]
        file = checkpoint.files[name]
        if Path(file).name != file:
            raise CastoffError(f"{INDEX_FILE} names {file!r}; files beside the index are read")
        shards.setdefault(file, []).append(_Item(piece, form, dtype))
    return tuple(_Shard(file, tuple(items)) for file, items in sorted(shards.items()))


def _forms(setup: Setup) -> dict[str, tuple[Piece, LinearFormat | None]]:
    """Every tensor of the model, MTP blocks included, and the format that a run would hold it in."""
    model = setup.model
    parameters = [("", parameter) for parameter in outer_parameters(model).values()]
    for layer in range(model.num_hidden_layers + model.num_nextn_predict_layers):
        parameters += [(f"model.layers.{layer}.", parameter) for parameter in layer_parameters(model, layer)]
    return {
        piece.name: (piece, parameter_format(setup, parameter))
        for prefix, parameter in parameters
        for pieces in checkpoint_pieces(parameter, prefix)
        for piece in pieces
    }


def _state(source: Path, action: LinearAction, checkpoint: Checkpoint) -> str:
    files = [source / name for name in sorted({_CONFIG, *checkpoint.files.values()})]
    facts = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    return json.dumps({"source": str(source.resolve()), "action": action, "files": facts}, indent=2) + "\n"


def _check_names(shards: tuple[_Shard, ...], copied: set[str]) -> None:
    """Refuse files of tensors that would be written over, or recognised as something else."""
    taken = copied | {INDEX_FILE, _CONFIG, STATE_FILE}
    for shard in shards:
        if shard.name in taken or shard.name.startswith(TEMPORARY_PREFIX):
            raise CastoffError(
                f"the checkpoint keeps tensors in {shard.name}, a name that castoff convert writes itself"
            )


def _check_output(output: Path, state: str, own: set[str]) -> None:
    """Refuse a directory in which anything but this conversion has been written."""
    try:
        found = {path.name for path in output.iterdir()} if output.exists() else set()
    except OSError as error:
        raise CastoffError(f"cannot read -o {output}: {error.strerror or error}") from None
    if not found:
        return
    advice = "give a new or an empty directory with -o, or delete this one"
    if STATE_FILE not in found:
        what = "a checkpoint already" if _CONFIG in found else f"{min(found)} and no conversion that was begun"
        raise CastoffError(f"-o {output} holds {what}; {advice}")
    try:
        begun = (output / STATE_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        begun = ""
    if begun != state:
        raise CastoffError(f"-o {output} holds the begin of another conversion, {_described(begun)}; {advice}")
    foreign = sorted(name for name in found - own if not name.startswith(TEMPORARY_PREFIX))
    if foreign:
        raise CastoffError(f"-o {output} holds {foreign[0]}, which this conversion does not write; {advice}")


def _described(state: str) -> str:
    try:
        values = json.loads(state)
        return f"of {values['source']} to {values['action']} with other files or settings"
    except (ValueError, KeyError, TypeError):
        return f"whose {STATE_FILE} cannot be read"


def _check_space(output: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(output if output.exists() else output.resolve().parent).free
    # What an interrupted attempt left is deleted first.
    free_bytes += sum(path.stat().st_size for path in output.glob(f"{TEMPORARY_PREFIX}*.tmp"))
    if needed_bytes > free_bytes:
        raise CastoffError(
            f"-o {output} needs {needed_bytes:,} bytes, and {free_bytes:,} are free there; free some or give another "
            "directory"
        )


def _begin(output: Path, state: str) -> None:
    try:
        output.mkdir(exist_ok=True)
        for path in output.glob(f"{TEMPORARY_PREFIX}*.tmp"):
            path.unlink()
    except OSError as error:
        raise CastoffError(f"cannot write to -o {output}: {error.strerror or error}") from None
    _write_text(output / STATE_FILE, state)


def _write(
    shard: _Shard, checkpoint: Checkpoint, output: Path, label: str, progress: Callable[[str], None]
) -> None:  # fmt: skip
    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, item in enumerate(shard.items, start=1):
            progress(f"{label}: tensor {done} of {len(shard.items)}")
            yield from item.tensors(checkpoint)

    write_shard(output / shard.name, shard.contents, tensors())


def _finish(source: Path, action: LinearAction, output: Path, shards: tuple[_Shard, ...]) -> None:
    """Write the index, then config.json, and say that nothing is left to do."""
    if (source / INDEX_FILE).exists():
        weight_map = {name: shard.name for shard in shards for name in shard.contents}
        size_bytes = sum(shard_bytes(shard.contents) for shard in shards)
        index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        _write_text(output / INDEX_FILE, json.dumps(index, indent=2) + "\n")
    kept = [
        item.piece.name.removesuffix(".weight")
        for shard in shards
        for item in shard.items
        if item.form is None and len(item.piece.shape) == 2
    ]
    config = {**raw_config(str(source)), "quantization_config": quantization_config(action, sorted(kept))}
    _write_text(output / _CONFIG, json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (output / STATE_FILE).unlink()


def _write_text(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def _torch_dtype(dtype: str) -> Tensor:
    return getattr(torch, next(name for name, own in _PLAIN_DTYPES.items() if own == dtype))
