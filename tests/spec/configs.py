"""Reading a config as if it came from a file, for the tests of the readers."""

from typing import Any

import pytest

from castoff.errors import CastoffError
from castoff.spec.model import ModelSpec, read_model

Config = dict[str, Any]


def read(config: Config) -> ModelSpec:
    return read_model(config, name="test", source="dir/config.json")


def refused(config: Config) -> str:
    """The message with which the config is refused."""
    with pytest.raises(CastoffError) as caught:
        read(config)
    message = str(caught.value)
    assert message.startswith("dir/config.json: ")
    return message
