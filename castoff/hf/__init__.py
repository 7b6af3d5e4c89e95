"""castoff's KV offload inside transformers: `offload` a model, and `generate` reads latent rows from host memory."""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs={"cache": ["OffloadedCache", "offload"]})
