"""Memory of the prefill that comes before a decode step on the same device.

An engine that prefills and decodes on one device keeps the memory of both: what the allocator took for the prompt's
pass stays taken. A pass needs the activations of the tokens that the rank computes, and what it holds of the whole
prompt: under context parallelism a rank computes a share of the tokens, and gathers keys and hidden states of all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from castoff.casting.footprint import peak_activation_bytes
from castoff.dims import Dim
from castoff.errors import CastoffError
from castoff.model.record import record_step
from castoff.model.setup import Setup
from castoff.ops.lengths import Lengths
from castoff.ops.work import DTYPE_BYTES
from castoff.spec.backend import Backend
from castoff.spec.checks import check_whole
from castoff.spec.scenario import RequestClass


@lru_cache(maxsize=64)
def _computed_bytes(setup: Setup, prefill_tokens: int) -> Dim:
    """Activations of one pass. Asked for again with every batch that is tried for size."""
    pass_of_one = Lengths((RequestClass(1, 0, prefill_tokens),))
    return peak_activation_bytes(record_step(replace(setup, mode="prefill"), pass_of_one))


def prefill_peak_bytes(setup: Setup, backend: Backend, prefill_tokens: int, prompt_tokens: Dim) -> Dim:
    """Peak of one prefill pass on the predicted rank.

    prefill_tokens: tokens that the rank computes in the pass. prompt_tokens: length of the whole prompt, of which the
    backend holds `prompt_hidden_states` hidden states.
    Raises CastoffError for a step that is a prefill itself, or no whole number of at least one token.
    """
    if setup.mode == "prefill":
        raise CastoffError("--prefill-tokens is for decode steps; a prefill counts its own activations")
    check_whole("--prefill-tokens", prefill_tokens, least=1)
    computed = _computed_bytes(setup, prefill_tokens)
    hidden_state = setup.model.hidden_size * DTYPE_BYTES["bf16"]
    return computed + prompt_tokens * (backend.prompt_hidden_states * hidden_state)
