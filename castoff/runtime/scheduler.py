"""Continuous batching: requests join when a slot and cache blocks are free, decode together, and leave when done.

With MTP every decode step verifies the drafts of the step before: it computes the last token and k drafts, keeps the
drafts that equal what the model itself chooses, and one token more. A rejected draft's cache rows are overwritten by
the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.model.inputs import Selected
from castoff.ops.program import Tensor
from castoff.runtime.engine import Engine, Rows
from castoff.runtime.sampling import Sampling, choose

torch = lazy.load("torch")


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of token ids and how many tokens to add at most."""

    prompt: tuple[int, ...]
    max_new_tokens: int


@dataclass(slots=True)
class Result:
    """What a request got: its new tokens, and when the first and the last came (seconds after the start)."""

    tokens: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    last_token_s: float = 0.0


@dataclass(slots=True)
class Statistics:
    """Counts over a run.

    sparse_steps: decode steps in which some request was longer than index_topk. request_steps: requests of all decode
    steps. accepted_drafts: for each draft position, in how many of those the draft was accepted. shared_prompt_tokens:
    of which the rows were another request's too.
    """

    decode_steps: int = 0
    sparse_steps: int = 0
    request_steps: int = 0
    decoded_tokens: int = 0
    shared_prompt_tokens: int = 0
    accepted_drafts: list[int] = field(default_factory=list)

    def add(self, other: Statistics) -> None:
        """Take in another attention-DP rank's counts; its steps went on beside these."""
        self.decode_steps = max(self.decode_steps, other.decode_steps)
        self.sparse_steps = max(self.sparse_steps, other.sparse_steps)
        self.request_steps += other.request_steps
        self.decoded_tokens += other.decoded_tokens
        self.shared_prompt_tokens += other.shared_prompt_tokens
        pairs = zip(self.accepted_drafts, other.accepted_drafts, strict=True)
        self.accepted_drafts = [own + others for own, others in pairs]

    @property
    def acceptance_length(self) -> float:
        """Mean tokens that a decode step gave a request; 0 before any."""
        return self.decoded_tokens / self.request_steps if self.request_steps else 0.0

    @property
    def acceptance_rates(self) -> list[float]:
        """For each draft position, the share of a request's decode steps in which that draft was accepted.

        They never rise, and add up to acceptance_length - 1; all 0 before any step.
        """
        return [accepted / max(self.request_steps, 1) for accepted in self.accepted_drafts]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A decode step: who took part, with how many tokens after it, how many of them kept; and what each full layer
    chose, int32 (B · S, K)."""

    requests: Sequence[int | None]
    lengths: Sequence[int]
    kept: Sequence[int]
    chosen: Sequence[Tensor]


@dataclass(slots=True)
class _Running:
    """A request in a slot. cached: tokens whose rows are in the cache. last: the newest token, not yet cached."""

    index: int
    request: Request
    result: Result
    cached: int = 0
    last: int = 0
    drafts: list[int] = field(default_factory=list)


class Scheduler:
    """Runs requests through an engine, at most `slots` at a time on every attention-DP rank.

    Requests are dealt to these ranks in turn. The ranks of one TP group choose alike, since every logit is computed
    once and handed round.

    chunk_tokens: prompts are prefilled in chunks of this many tokens. stop_ids: tokens that end a request. record: told
    of every decode step what was selected in it. shares_prefixes: a request whose prompt begins as a running one's
    takes over its cache rows instead of computing them.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        slots: int,
        chunk_tokens: int,
        sampling: Sampling,
        stop_ids: frozenset[int] = frozenset(),
        progress: Callable[[int, int], None] = lambda done, total: None,
        record: Callable[[StepRecord], None] | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        self._shares_prefixes = shares_prefixes
        self._record = record
        self._engine = engine
        self._slots = slots
        self._chunk = chunk_tokens
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._progress = progress
        self._drafts = engine.setup.mtp.num_mtp_tokens
        self.statistics = Statistics(accepted_drafts=[0] * self._drafts)

    def run(self, requests: Sequence[Request]) -> list[Result]:
        """Results in the order of the requests. Raises CastoffError where a request can never fit in the cache."""
        for index, request in enumerate(requests):
            self._check(index, request)
        dp = self._engine.setup.mesh.dp
        own = {index: Result() for index in range(dp.position, len(requests), dp.size)}
        self._run([_Running(index, requests[index], result) for index, result in own.items()])
        self._engine.finish()
        results: dict[int, Result] = {}
        everywhere = self._engine.gather((own, self.statistics))
        self.statistics = Statistics(accepted_drafts=[0] * self._drafts)
        for theirs, statistics in everywhere:
            results |= theirs
            self.statistics.add(statistics)
        return [results[index] for index in range(len(requests))]

    def _run(self, dealt: Sequence[_Running]) -> None:
        started = time.perf_counter()
        waiting = deque(dealt)
        running: list[_Running] = []
        while waiting or running:
            while waiting and len(running) < self._slots and self._has_room(waiting[0]):
                joined = waiting.popleft()
                self._prefill(joined, running)
                joined.result.first_token_s = joined.result.last_token_s = time.perf_counter() - started
                running.append(joined)
            running = self._drop_done(running)
            if running:
                self._decode(running, started)
                running = self._drop_done(running)
            self._progress(len(dealt) - len(waiting) - len(running), len(dealt))

    def _most_tokens(self, request: Request) -> int:
        return len(request.prompt) + request.max_new_tokens + 2 * self._drafts + 1

    def _check(self, index: int, request: Request) -> None:
        if not request.prompt:
            raise CastoffError(f"request {index} has an empty prompt; give at least one token")
        if request.max_new_tokens < 1:
            raise CastoffError(f"request {index}: --max-new-tokens must be at least 1, got {request.max_new_tokens}")
        vocabulary = self._engine.setup.model.vocab_size
        strange = [token for token in request.prompt if not 0 <= token < vocabulary]
        if strange:
            raise CastoffError(f"request {index} has token {strange[0]}; the vocabulary has ids 0 to {vocabulary - 1}")
        if self._most_tokens(request) > self._engine.capacity_tokens:
            raise CastoffError(
                f"request {index} may reach {self._most_tokens(request)} tokens, and the KV cache holds "
                f"{self._engine.capacity_tokens}"
            )

    def _has_room(self, candidate: _Running) -> bool:
        """Whether the blocks that a request may ever need are free; they are taken when it joins."""
        return self._engine.has_room(self._most_tokens(candidate.request))

    def _prefill(self, joined: _Running, running: Sequence[_Running]) -> None:
        prompt = joined.request.prompt
        donor, shared = self._shared_prefix(joined, running) if self._shares_prefixes else (None, 0)
        self._engine.admit(joined.index, self._most_tokens(joined.request), prefix_of=donor, shared_tokens=shared)
        self.statistics.shared_prompt_tokens += shared
        for start in range(shared, len(prompt), self._chunk):
            end = min(start + self._chunk, len(prompt))
            rows = Rows([joined.index], [end])
            output = self._engine.forward(self._ids([prompt[start:end]]), rows, prefill=True, last=True)
            following = prompt[start + 1 : end + 1]
            if end == len(prompt):
                joined.last = self._choose(output.logits_TV, joined, end - 1)[0]
                following = (*following, joined.last)
            if self._drafts:
                draft = self._engine.draft(self._ids([following]), output.hidden_TD, Selected(), rows, prefill=True)
        joined.cached = len(prompt)
        self._keep(joined, [joined.last])
        if self._drafts:
            self._draft_on([joined], draft.ids_T.tolist(), draft.hidden_TD[-1:], Selected())

    def _shared_prefix(self, joined: _Running, running: Sequence[_Running]) -> tuple[int | None, int]:
        """The running request with most whole blocks of this prompt, and their tokens; none where it has no block.

        The token after them must be the same too, since the MTP block's row of a token depends on the next one.
        """
        best: tuple[int | None, int] = (None, 0)
        for other in running:
            pairs = zip(joined.request.prompt, other.request.prompt, strict=False)
            same = next((at for at, (own, theirs) in enumerate(pairs) if own != theirs), None)
            if same is None:
                same = min(len(joined.request.prompt), len(other.request.prompt))
            tokens = self._engine.whole_blocks(same - 1)
            if tokens > best[1]:
                best = (other.index, tokens)
        return best

    def _decode(self, running: list[_Running], started: float) -> None:
        queries = 1 + self._drafts
        ids_BS = self._ids([[item.last, *item.drafts] for item in running])
        lengths = [item.cached + queries for item in running]
        rows = Rows([item.index for item in running], lengths)
        output = self._engine.forward(ids_BS, rows, prefill=False, last=False)
        logits_BSV = output.logits_TV.view(len(running), queries, -1)  # type: ignore[union-attr]
        chosen = [self._choose(logits_BSV[row], item, item.cached) for row, item in enumerate(running)]
        accepted = [_agreeing(item.drafts, choice) for item, choice in zip(running, chosen, strict=True)]
        self._count(lengths, accepted)
        if self._record is not None:
            kept = [count + 1 for count in accepted]
            self._record(StepRecord(rows.requests, lengths, kept, output.chosen))
        if self._drafts:
            kept_B = torch.tensor(accepted, device=ids_BS.device)
            ids_BS = self._ids(chosen)
            draft = self._engine.draft(ids_BS, output.hidden_TD, Selected(), rows, prefill=False, sampled_B=kept_B)
        for item, choice, count in zip(running, chosen, accepted, strict=True):
            item.cached += count + 1
            item.last = choice[count]
            self._keep(item, choice[: count + 1])
            item.result.last_token_s = time.perf_counter() - started
        if self._drafts:
            # Of each request's S rows, the one of its last kept token.
            at = torch.arange(len(running), device=ids_BS.device) * queries + kept_B
            self._draft_on(running, draft.ids_T.tolist(), draft.hidden_TD[at], self._engine.shared_topk(draft, at))

    def _draft_on(self, running: list[_Running], first: list[int], hidden_BD: Tensor, reused: Selected) -> None:
        """The draft calls after the first: one token each, fed with the draft and the hidden state before it."""
        for item, token in zip(running, first, strict=True):
            item.drafts = [token]
        for draft in range(1, self._drafts):
            # What earlier draft calls wrote is computed anew in the next step.
            committed = [item.cached for item in running]
            rows = Rows([item.index for item in running], [cached + draft for cached in committed], committed=committed)
            ids_B1 = self._ids([[item.drafts[-1]] for item in running])
            output = self._engine.draft(ids_B1, hidden_BD, reused, rows, prefill=False)
            hidden_BD = output.hidden_TD
            for item, token in zip(running, output.ids_T.tolist(), strict=True):
                item.drafts.append(token)

    def _count(self, lengths: list[int], accepted: list[int]) -> None:
        statistics, indexer = self.statistics, self._engine.setup.model.indexer
        statistics.decode_steps += 1
        statistics.sparse_steps += indexer is not None and max(lengths) > indexer.index_topk
        statistics.request_steps += len(accepted)
        statistics.decoded_tokens += sum(accepted) + len(accepted)
        for draft in range(self._drafts):
            statistics.accepted_drafts[draft] += sum(count > draft for count in accepted)

    def _choose(self, logits_SV: Tensor | None, item: _Running, position: int) -> list[int]:
        assert logits_SV is not None, "sampling needs whole rows of logits"
        return choose(logits_SV, self._sampling, item.index, position)

    def _keep(self, item: _Running, tokens: list[int]) -> None:
        """Add tokens to a result, up to the first that ends the request."""
        for token in tokens:
            if self._is_done(item):
                return
            item.result.tokens.append(token)

    def _is_done(self, item: _Running) -> bool:
        tokens = item.result.tokens
        return len(tokens) >= item.request.max_new_tokens or (bool(tokens) and tokens[-1] in self._stop_ids)

    def _drop_done(self, running: list[_Running]) -> list[_Running]:
        for item in running:
            if self._is_done(item):
                self._engine.release(item.index)
        return [item for item in running if not self._is_done(item)]

    def _ids(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in rows], dtype=torch.long, device=self._engine.device)


def _agreeing(drafts: list[int], chosen: list[int]) -> int:
    """How many drafts, from the first on, are what the model chose."""
    count = 0
    while count < len(drafts) and drafts[count] == chosen[count]:
        count += 1
    return count
