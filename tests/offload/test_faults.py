"""What breaks ends a run with a sentence, or is mended: never a wrong token, never a hang."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from castoff.errors import CastoffError
from castoff.model import offload as programs
from castoff.offload import host_store, memory
from castoff.ops.program import op_observer
from castoff.runtime.engine import Engine, Rows
from castoff.runtime.sampling import Sampling
from castoff.runtime.scheduler import Scheduler
from castoff.spec.offload import OffloadMode

torch = pytest.importorskip("torch")

from tests.offload.runs import MODES, Case, engine_of, opened, options_of, outcome  # noqa: E402

CASE = Case(prompts=(40, 70), slots=2, new_tokens=6)


def test_a_host_without_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def full(*args: object, **kwargs: object) -> object:
        if "pin_memory" in kwargs:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes\nmore")
        return empty(*args, **kwargs)

    monkeypatch.setattr(host_store.torch, "empty", full)
    with pytest.raises(CastoffError, match=r"could not be taken: DefaultCPUAllocator.*allocate 1 bytes; run fewer"):
        engine_of(CASE, options_of("direct"))


def test_a_limit_is_checked_before_anything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    monkeypatch.setattr(host_store.torch, "empty", lambda *args, **_: taken.append(args))
    with pytest.raises(CastoffError, match=r"needs [\d,]+ bytes of host memory, and --host-gib allows 1,000"):
        host_store.check_host_bytes(10_000, 1_000)
    monkeypatch.setattr(host_store, "available_bytes", lambda: 9_999)
    with pytest.raises(CastoffError, match=r"needs 10,000 bytes of host memory, and 9,999 are free"):
        host_store.check_host_bytes(10_000, None)
    host_store.check_host_bytes(9_999, None)
    assert not taken


def test_host_memory_is_given_back_where_the_device_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pinned must not stay so when its memory goes."""
    taken: list[object] = []
    given_back: list[object] = []
    host_rows = memory.host_rows

    def counted(*args: object) -> object:
        taken.append(host_rows(*args))  # type: ignore[arg-type]
        return taken[-1]

    def full(*_: object, **__: object) -> object:
        raise RuntimeError("out of memory: tried to allocate 1 GiB\nmore")

    monkeypatch.setattr(memory, "host_rows", counted)
    monkeypatch.setattr(memory, "release", lambda rows, device: given_back.append(rows))
    monkeypatch.setattr(memory, "_state", full)
    with pytest.raises(
        CastoffError, match=r"pools of --offload direct could not be taken: out of memory.*--pool-tokens"
    ):
        engine_of(CASE, options_of("direct"))
    assert len(taken) == len(given_back) == 4
    assert all(own is other for own, other in zip(taken, given_back, strict=True))


class Interrupted(BaseException):
    """What a person's Ctrl-C is."""


@contextmanager
def failing_at(op: str, call: int) -> Iterator[None]:
    """Have the call-th call of an op fail, once."""
    left = [call]

    @contextmanager
    def observe(name: str) -> Iterator[None]:
        if name == op:
            left[0] -= 1
            if left[0] == 0:
                raise Interrupted
        yield

    token = op_observer.set(observe)
    try:
        yield
    finally:
        op_observer.reset(token)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", ["mlapo", "multihead_latent_attention", "host_row_write"])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_step_that_was_interrupted_can_be_made_again(mode: OffloadMode, op: str, call: int) -> None:
    """Pools forget what the step was to bring; the request goes on with the same tokens."""
    logits = []
    for interrupted in (False, True):
        with opened(CASE, options_of(mode)) as (engine, _):
            first = start(engine)
            for token in (3, 4):
                step(engine, first, token)
            if interrupted:
                with pytest.raises(Interrupted), failing_at(op, call):
                    step(engine, first, 5, keep=False)
            logits.append([step(engine, first, token) for token in (5, 6, 7)])
    assert all(torch.equal(own, other) for own, other in zip(*logits, strict=True))


def start(engine: Engine) -> list[int]:
    """Prefill one request; returns its length, which steps move on."""
    request = CASE.requests[1]
    engine.admit(0, CASE.longest)
    ids_BS = torch.tensor([request.prompt])
    engine.forward(ids_BS, Rows([0], [len(request.prompt)]), prefill=True, last=True)
    return [len(request.prompt)]


def step(engine: Engine, length: list[int], token: int, *, keep: bool = True) -> object:
    output = engine.forward(torch.tensor([[token]]), Rows([0], [length[0] + 1]), prefill=False, last=False)
    length[0] += keep
    return output.logits_TV


@pytest.mark.parametrize("mode", MODES)
def test_a_request_cancelled_in_the_middle_leaves_nothing_to_the_next(mode: OffloadMode) -> None:
    expected = outcome(CASE).tokens
    engine = engine_of(CASE, options_of(mode))
    with torch.inference_mode():
        length = start(engine)
        with pytest.raises(Interrupted), failing_at("multihead_latent_attention", 2):
            step(engine, length, 3)
        engine.release(0)
        scheduler = Scheduler(engine, slots=2, chunk_tokens=CASE.chunk_tokens, sampling=Sampling())
        assert [result.tokens for result in scheduler.run(CASE.requests)] == expected
    engine.close()


@pytest.mark.parametrize(
    ("mode", "work"),
    [("direct", "fetch"), ("serve_install", "install"), ("gather", "store_rows"), ("direct", "store_rows")],
)
def test_a_failure_in_a_copy_thread_ends_the_run_with_a_sentence(
    mode: OffloadMode, work: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(programs, work)

    def fail(*args: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise OSError("the link is down")
        original(*args)

    monkeypatch.setattr(programs, work, fail)
    with pytest.raises(CastoffError, match="copying cache rows failed: OSError: the link is down"):
        outcome(CASE, options_of(mode))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("castoff-")]


@pytest.mark.parametrize("mode", MODES)
def test_a_corrupted_row_is_named(mode: OffloadMode) -> None:
    """A row of the pool that is not the host's any more; a row of host memory, where everything is read from there."""
    with opened(CASE, options_of(mode)) as (engine, _):
        length = start(engine)
        for token in (3, 4):
            step(engine, length, token)
        assert engine.offload is not None
        held = engine.offload.memory
        held.layers[2].region[: held.sizes.pool_rows] += 1
        with pytest.raises(CastoffError, match=r"--check: layer 2, request 0, rank \d+: token \d+ is not the row"):
            step(engine, length, 5)


def test_a_token_in_a_foreign_set_is_named() -> None:
    with opened(CASE, options_of("direct")) as (engine, _):
        length = start(engine)
        step(engine, length, 3)
        assert engine.offload is not None
        tags_RNW = engine.offload.memory.groups[0].state.tags_RNW
        sets = engine.offload.memory.sizes.sets
        tags_RNW[engine.offload._slots[0], :, -1] = (torch.arange(sets) + 1) % sets
        with pytest.raises(CastoffError, match=r"--check: layer 0, request 0: token \d+ is in "):
            step(engine, length, 4)


def test_layers_have_rows_of_their_own() -> None:
    """Each layer's rows carry its number: attention of a layer reads no other's."""
    with opened(CASE, options_of("direct")) as (engine, _):
        length = start(engine)
        step(engine, length, 3)
        assert engine.offload is not None
        layers = engine.offload.memory.layers
        held = {layer: rows.region[: engine.offload.memory.sizes.pool_rows] for layer, rows in layers.items()}
        for layer, rows in held.items():
            for other, others in held.items():
                shared = (rows == others).all(-1) & (rows != 0).any(-1)
                assert layer == other or not shared.any()


def test_a_full_slot_table_is_not_outgrown() -> None:
    """As many requests as slots, each ending at another time, twice over."""
    case = Case(prompts=(40, 70, 33, 64, 20, 90), slots=2, new_tokens=3)
    for mode in MODES:
        assert outcome(case, options_of(mode)).tokens == outcome(case).tokens
