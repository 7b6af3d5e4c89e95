"""Prompts as token ids: from a text, a file of texts or of ids, or random."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import lazy_loader as lazy

from castoff.errors import CastoffError
from castoff.runtime.options import RunOptions
from castoff.spec.model import ModelSpec

Prompt = tuple[int, ...]


def load_tokenizer(model: str) -> Any:
    """The tokenizer beside a checkpoint, or None."""
    file = Path(model) / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizers = lazy.load("tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except ModuleNotFoundError:
        return None
    # The library raises nothing more special.
    except Exception as error:  # noqa: BLE001
        raise CastoffError(f"cannot read {file}: {error}") from None


def read_prompts(options: RunOptions, model: ModelSpec, tokenizer: Any) -> list[Prompt]:
    """Prompts as token ids, at least one, each with a token and none beyond the vocabulary; raises CastoffError."""
    if options.random_prompts is not None:
        return _random(options.random_prompts, options.seed, model.vocab_size)
    if options.prompt is not None:
        source, prompts = "--prompt", [_encode(options.prompt, tokenizer)]
    else:
        assert options.prompt_file is not None
        source, prompts = f"--prompt-file {options.prompt_file}", _from_file(options.prompt_file, tokenizer)
    if not prompts:
        raise CastoffError(f"{source} holds no prompt")
    for index, prompt in enumerate(prompts):
        _check(f"{source}: prompt {index}", prompt, model)
    return prompts


def _random(text: str, seed: int, vocabulary: int) -> list[Prompt]:
    match = re.fullmatch(r"([1-9][0-9]{0,9})[x×*]([1-9][0-9]{0,9})", text.strip())
    if match is None:
        raise CastoffError(f"--random-prompts is a number of prompts and their length, 4x1000 say, got {text!r}")
    generator = random.Random(seed)
    return [tuple(generator.randrange(vocabulary) for _ in range(int(match[2]))) for _ in range(int(match[1]))]


def _from_file(path: Path, tokenizer: Any) -> list[Prompt]:
    try:
        # Editors of some systems begin a file with a byte-order mark.
        text = path.read_text(encoding="utf-8-sig")
    # A ValueError for text that is not UTF-8, and for a path that no file system allows.
    except (OSError, ValueError) as error:
        raise CastoffError(f"cannot read --prompt-file {path}: {error}") from None
    if text.lstrip().startswith("["):
        return _id_lists(text, path)
    if text.strip() and tokenizer is None:
        raise CastoffError(
            f"--prompt-file {path} is taken for lines of text, which need a tokenizer.json beside the model and the "
            "tokenizers package; token ids are a JSON list of lists, [[1, 2], [3]] say"
        )
    return [_encode(line, tokenizer) for line in text.splitlines() if line.strip()]


def _id_lists(text: str, path: Path) -> list[Prompt]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise CastoffError(f"--prompt-file {path} is not JSON: {error}") from None
    except RecursionError:
        raise CastoffError(f"--prompt-file {path} is not JSON: lists are nested too deeply") from None
    # A bool is an int to Python, and no token.
    if not all(isinstance(ids, list) and all(type(token) is int for token in ids) for ids in values):
        raise CastoffError(f"--prompt-file {path} must hold a JSON list of lists of token ids")
    return [tuple(ids) for ids in values]


def _check(name: str, prompt: Prompt, model: ModelSpec) -> None:
    if not prompt:
        raise CastoffError(f"{name} is empty; give at least one token")
    strange = [token for token in prompt if not 0 <= token < model.vocab_size]
    if strange:
        raise CastoffError(
            f"{name} has token {strange[0]}; the vocabulary of {model.name} has ids 0 to {model.vocab_size - 1}"
        )


def _encode(text: str, tokenizer: Any) -> Prompt:
    if tokenizer is None:
        raise CastoffError(
            "text prompts need a tokenizer.json beside the model and the tokenizers package; give token ids as JSON "
            "lists in --prompt-file, or --random-prompts NxLEN"
        )
    try:
        return tuple(tokenizer.encode(text).ids)
    except Exception as error:  # noqa: BLE001
        raise CastoffError(f"the tokenizer cannot read the prompt {text[:40]!r}: {error}") from None
