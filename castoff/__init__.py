"""castoff: predict, plan and run long-context sparse-attention LLMs with KV-cache offload."""

from __future__ import annotations

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "casting.prediction": ["Prediction"],
        "api": ["cast", "serve", "sweep"],
        "errors": ["CastoffError", "CastoffWarning"],
        "serving.result": ["ServeResult"],
        "serving.workload": ["Arrivals", "ClosedLoop"],
        "spec.hit_profile": ["Hits"],
        "spec.offload": ["Offload"],
        "spec.scenario": ["Compilation", "Mtp", "Parallel", "Quant", "Scenario", "Workload"],
    },
)
