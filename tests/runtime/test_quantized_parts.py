"""Parts of quantised tensors: a slice holds the numbers that the whole has there."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
from castoff.errors import CastoffError
from castoff.ops.linear import Weight
from castoff.runtime.checkpoint import Checkpoint
from castoff.runtime.stored import Part, Piece, read_plain, read_quantized, read_weight
from tests.runtime.fake_quant import dequantized
from tests.runtime.quantized import SUFFIX, WEIGHT, Given, form_of, plain_weight, same
from tests.runtime.tiny import Tiny, tensors_of, torch

ROWS, COLUMNS = 256 + 40, 384


LARGE = Piece("w.weight", (ROWS, COLUMNS))


@pytest.fixture
def large() -> Any:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def stored_in(action: str, whole: Any) -> tuple[Given, dict[str, Any]]:
    values, scales = read_quantized(Given({"w.weight": whole}), [(LARGE, Part())], form_of(action))
    tensors = {"w.weight": values, "w.weight" + SUFFIX[action]: scales}
    return Given(tensors), tensors


PARTS = [Part(), Part((0, 128)), Part((128, ROWS)), Part(None, (128, 256)), Part((256, ROWS), (256, COLUMNS))]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_parts_are_parts_of_the_whole(large: Any, action: str, part: Part) -> None:
    """Stored, dequantised or quantised on reading: a slice holds the numbers that the whole has there."""
    source, tensors = stored_in(action, large)
    rows, columns = slice(*(part.rows or (0, ROWS))), slice(*(part.columns or (0, COLUMNS)))
    expected = dequantized(tensors, "w.weight")[rows, columns]
    assert same(read_plain(source, LARGE, part), expected)
    read = read_weight(source, LARGE, part)
    for values, scales in (
        read,
        read_quantized(source, [(LARGE, part)], form_of(action)),
        read_quantized(Given({"w.weight": large}), [(LARGE, part)], form_of(action)),
    ):
        assert same(values, tensors["w.weight"][rows, columns])
        assert same(scales, read[1])
        assert same(plain_weight(Weight(values, scales, form_of(action)), torch.float32).values, expected)
    plain = Given({"w.weight": large})
    assert read_weight(plain, LARGE, part)[1] is None
    assert same(read_plain(plain, LARGE, part), large[rows, columns])


@pytest.mark.parametrize("part", [Part((64, 192)), Part((0, 100)), Part(None, (0, 192))], ids=str)
def test_parts_that_cut_a_block(large: Any, part: Part) -> None:
    """Refused where the blocks stay, and not where they are dequantised; INT8 has no blocks."""
    source, tensors = stored_in("FP8", large)
    for read in (
        lambda: read_weight(source, LARGE, part),
        lambda: read_quantized(source, [(LARGE, part)], form_of("FP8")),
        lambda: read_quantized(Given({"w.weight": large}), [(LARGE, part)], form_of("FP8")),
    ):
        with pytest.raises(CastoffError, match=r"w\.weight.*--tp-size or --quantize-linear-action DISABLED"):
            read()
    rows, columns = slice(*(part.rows or (0, ROWS))), slice(*(part.columns or (0, COLUMNS)))
    assert same(read_plain(source, LARGE, part), dequantized(tensors, "w.weight")[rows, columns])
    rows_of, whole = stored_in("W8A8_DYNAMIC", large)
    values, _ = read_quantized(rows_of, [(LARGE, part)], form_of("W8A8_DYNAMIC"))
    assert same(values, whole["w.weight"][rows, columns])


def test_whole_blocks_are_joined_as_they_are(large: Any) -> None:
    source, tensors = stored_in("FP8", large)
    values, scales = read_quantized(source, [(LARGE, Part((0, 128))), (LARGE, Part((128, ROWS)))], form_of("FP8"))
    assert same(values, tensors["w.weight"])
    assert same(scales, tensors["w.weight_scale_inv"])


def test_parts_from_a_file(converted: Callable[[str, str], Tiny], action: str) -> None:
    tiny = converted("glm5", action)
    piece = Piece(WEIGHT, (64, 80), quantizable=True)
    source, stored = Checkpoint(tiny.directory, tiny.spec, mtp=False), tensors_of(tiny.directory)
    assert same(source.read(piece, Part((3, 9), (10, 20))), stored[WEIGHT][3:9, 10:20])
    assert same(read_plain(source, piece, Part((3, 9), (10, 20))), dequantized(stored, WEIGHT)[3:9, 10:20])
    norm = Piece("model.norm.weight", (64,))
    assert same(source.read(norm, Part((3, 9))), stored[norm.name][3:9])
