"""Writing a trace step by step; the file appears under its name when it is complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from castoff.errors import CastoffError
from castoff.files import NewFile
from castoff.trace.header import TraceHeader
from castoff.trace.steps import Int32Array, Integers, located, pack


class TraceWriter:
    """A trace that is being written, under a temporary name beside its own; a context manager.

    Leaving the context without an error, or `close`, puts the file in its place, over one that is there; leaving it
    with one, or `discard`, removes it. Raises CastoffError where the file cannot be written.

    header: what the trace says of itself; its sizes are the most that a step may have.
    """

    def __init__(self, path: Path | str, header: TraceHeader) -> None:
        self.path = Path(path)
        self.header = header
        self.num_steps = 0
        with _writing(self.path):
            if self.path.exists() and not self.path.is_file():
                raise CastoffError(f"cannot write a trace to {self.path}: it is no regular file; name another")
            self._new = NewFile(self.path)
            try:
                self._new.file.write(header.encoded(0))
            except BaseException:
                self._new.discard()
                raise

    def append(
        self,
        request_ids_B: Integers,
        lengths_B: Integers | None,
        accepted_B: Integers | None,
        ids_GBSK: Integers,
        *,
        query_lengths_B: Integers | None = None,
    ) -> None:
        """Write one step. There may be fewer rows, queries and ranks than the header has room for.

        request_ids_B: which request is in a row; −1 for an unused row, whose other values are ignored.
        lengths_B: tokens of each request, its query tokens of this step included; None where the header says that
            lengths are not known.
        accepted_B: how many of its query tokens were kept, −1 for not known; None: of no request.
        ids_GBSK: the selected positions in the request, the best first; −1 for none. None lies beyond the position of
            its query.
        query_lengths_B: query tokens of each request, the first ones of the S; None: all S of `ids_GBSK`.

        Integers of any width. Raises CastoffError for values that no step can have; the writer stays usable then.
        """
        with located(f"step {self.num_steps} of {self.path}"):
            record_W = pack(
                self.header, request_ids_B, lengths_B, accepted_B, ids_GBSK, query_lengths_B=query_lengths_B
            )
        self.append_record(record_W)

    def append_record(self, record_W: Int32Array) -> None:
        """Write one step that `steps.pack` made for this header."""
        assert record_W.shape == (self.header.record_words,), "a record of another trace"
        try:
            with _writing(self.path):
                self._new.file.write(record_W.data)
        except CastoffError:
            # A record in part must not be followed by others.
            self.discard()
            raise
        self.num_steps += 1

    def close(self) -> None:
        """Complete the file and put it in its place; if that fails, it is removed."""
        try:
            with _writing(self.path):
                self._new.file.seek(0)
                self._new.file.write(self.header.encoded(self.num_steps))
                self._new.commit()
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove what was written; nothing after `close`."""
        self._new.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def refuse_sources(target: Path, *sources: Path | None) -> None:
    """Refuse to write over a file that is read. Raises CastoffError."""
    for source in sources:
        if source is not None and target.resolve() == source.resolve():
            raise CastoffError(f"{target} is what is read; name another file to write")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CastoffError(f"cannot write {path}: {error.strerror or error}") from None
