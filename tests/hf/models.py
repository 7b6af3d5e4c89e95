"""Tiny models of transformers, and what they generate with and without castoff's offload."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from castoff.spec.offload import Offload

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from castoff.hf import OffloadedCache, offload  # noqa: E402
from tests.runtime.tiny import config_of, redraw, transformers  # noqa: E402

POOL = 32
NONE = Offload()
MODES = (
    Offload(offload="gather"),
    Offload(offload="serve_install", pool_tokens=POOL, ways=4),
    Offload(offload="direct", pool_tokens=POOL, ways=4),
)


def model_of(kind: str, seed: int = 0, dtype: Any = torch.float64) -> Any:
    """A model of its own."""
    classes = {"deepseek_v32": transformers.DeepseekV32ForCausalLM}
    model = classes.get(kind, transformers.GlmMoeDsaForCausalLM)(config_of(kind)).eval()
    redraw(model, seed)
    # Grouped products have no float64.
    model.set_experts_implementation("eager")
    return model.to(dtype)


shared_model = cache(model_of)
"""The same for every test that leaves it as it found it."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens, prompt included, and the logits of each new one."""

    sequences: Any
    logits: Any

    def agrees_with(self, other: "Generated", *, within: float) -> None:
        """Assert that tokens are the same, and logits up to rounding."""
        torch.testing.assert_close(self.logits, other.logits, rtol=0, atol=within)
        assert torch.equal(self.sequences, other.sequences)

    def equals(self, other: "Generated") -> None:
        """Assert that all bits are the same."""
        assert torch.equal(self.logits, other.logits)
        assert torch.equal(self.sequences, other.sequences)


def generate(model: Any, ids: Any, cache: Any = None, *, new_tokens: int = 6, **given: Any) -> Generated:
    """Generate greedily."""
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, **given}
    result = model.generate(
        ids, cache=cache, max_new_tokens=new_tokens, return_dict_in_generate=True, output_logits=True, **given
    )
    return Generated(result.sequences, torch.stack(result.logits))


def opened(model: Any, options: Offload, *, max_tokens: int = 256, batch: int = 1) -> OffloadedCache:
    """A cache that compares every row which attention reads with the host's."""
    return offload(model, options, max_tokens=max_tokens, batch=batch, check=options.offloads)
