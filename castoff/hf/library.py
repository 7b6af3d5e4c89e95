"""transformers, imported when castoff.hf is first used: classes here derive from its.

It puts another module object into its own place when it is imported, which lazy_loader's stand-ins do not survive.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from castoff.errors import CastoffError


def _imported() -> ModuleType:
    try:
        return import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise CastoffError("castoff.hf needs transformers: pip install 'castoff[hf,run]'") from None


transformers = _imported()
