"""Where a model's config.json is: shipped with the package, a path, or the local Hugging Face cache. No network."""

import difflib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from castoff.errors import CastoffError

SHIPPED_DIRECTORY = Path(__file__).resolve().parent.parent / "data" / "models"
ALIASES = {"glm52": "zai-org/GLM-5.2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A config.json and the name that reports give to its model: the id, or the path as the user wrote it."""

    name: str
    path: Path

    def text(self) -> str:
        """The file as it is; an error that names path and reason if it cannot be read."""
        try:
            # utf-8-sig: editors on Windows write a byte order mark, which JSON parsers refuse.
            return self.path.read_bytes().decode("utf-8-sig")
        except OSError as error:
            raise CastoffError(f"cannot read {self.path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise CastoffError(f"{self.path} is not a JSON file: byte {error.start} is not UTF-8") from None

    def _object(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        """An object's keys and values; a key that stands twice is an error, since readers disagree which one counts."""
        values = dict(pairs)
        if len(values) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CastoffError(f"{self.path}: the key {twice!r} stands twice in one object")
        return values

    def values(self) -> dict[str, object]:
        """The JSON object in the file; an error that names path and reason if there is none."""
        try:
            values: object = json.loads(self.text(), object_pairs_hook=self._object)
        except json.JSONDecodeError as error:
            where = f"line {error.lineno}, column {error.colno}"
            raise CastoffError(f"{self.path} is not valid JSON, or was cut short: {error.msg} ({where})") from None
        except (RecursionError, ValueError) as error:
            # CastoffError is a ValueError too, and already says what is wrong.
            if isinstance(error, CastoffError):
                raise
            raise CastoffError(f"{self.path} is not a usable config: {error}") from None
        if not isinstance(values, dict):
            raise CastoffError(f"{self.path} holds a JSON {_json_kind(values)}; a config.json is an object")
        return values


def shipped_models() -> tuple[str, ...]:
    """Ids of the models whose config ships with castoff, sorted."""
    return tuple(sorted(path.stem.replace("--", "/", 1) for path in SHIPPED_DIRECTORY.glob("*.json")))


def find_config(name_or_path: str) -> ConfigFile:
    """The config of a shipped id or alias, of a directory or .json file, or of an id in the Hugging Face cache.

    Looked for in this order; an error says what was tried, which shipped ids are close, and what to do.
    """
    name = ALIASES.get(name_or_path, name_or_path)
    if name in shipped_models():
        return ConfigFile(name=name, path=SHIPPED_DIRECTORY / f"{name.replace('/', '--', 1)}.json")
    path = _expanded(name)
    mode = _file_mode(path) if name.strip() else None
    if mode is not None:
        return ConfigFile(name=name, path=_config_at(path, mode))
    cached = _cached_config(name)
    if cached is not None:
        return ConfigFile(name=name, path=cached)
    raise _unknown_model(name)


def hugging_face_cache() -> Path:
    """The directory of the local Hugging Face cache, by the environment variables that huggingface_hub documents."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return _expanded(os.environ[variable])
    if os.environ.get("HF_HOME"):
        return _expanded(os.environ["HF_HOME"]) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def _config_at(path: Path, mode: int) -> Path:
    if stat.S_ISDIR(mode):
        config = path / "config.json"
        if _file_mode(config) is None:
            raise CastoffError(f"the directory {path} has no config.json")
        return config
    if path.suffix != ".json" or not stat.S_ISREG(mode):
        raise CastoffError(f"{path} is not a .json file; give a config.json or the directory that holds it")
    return path


def _cached_config(name: str) -> Path | None:
    """config.json of the snapshot that refs/main names, else of the newest snapshot that has one."""
    # An id is "name" or "organisation/name"; anything else is a path that does not exist.
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        return None
    model = hugging_face_cache() / f"models--{name.replace('/', '--')}"
    if _file_mode(model) is None:
        return None
    ref = model / "refs" / "main"
    if _file_mode(ref) is not None:
        config = model / "snapshots" / ConfigFile(name=name, path=ref).text().strip() / "config.json"
        if _file_mode(config) is not None:
            return config
    # Newest by the snapshot directory: its files are links to blobs that several snapshots share.
    configs = sorted((model / "snapshots").glob("*/config.json"), key=lambda path: path.parent.stat().st_mtime)
    return configs[-1] if configs else None


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        # "~name" of no user: a plain name.
        return Path(path)


def _file_mode(path: Path) -> int | None:
    """The mode bits of what is at the path, None if nothing is; an error if the path cannot be looked at."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise CastoffError(f"cannot read {path}: {error.strerror}") from None
    except (OSError, ValueError):
        # Not a possible path: too long for the file system, or with a null byte in it.
        return None


def _unknown_model(name: str) -> CastoffError:
    known: dict[str, str] = {}
    for model in shipped_models():
        known[model.lower()] = model
        known[model.rpartition("/")[2].lower()] = model
    known.update(ALIASES)
    close = difflib.get_close_matches(name.lower(), known, n=6, cutoff=0.7)
    suggestions = list(dict.fromkeys(known[match] for match in close))[:3]
    hint = f" Did you mean {' or '.join(suggestions)}?" if suggestions else ""
    if name.startswith(("/", "./", "../", "~")) or name.endswith(".json"):
        return CastoffError(f"there is no file or directory {name!r}.{hint}")
    return CastoffError(
        f"unknown model {name!r}: it is not a shipped id, not a file or directory, and not in the Hugging Face cache "
        f"{hugging_face_cache()}.{hint} Give a shipped id ({', '.join(shipped_models())}), a config.json or the "
        "directory that holds it, or download the config first (hf download MODEL config.json)"
    )


def _json_kind(value: object) -> str:
    if value is None:
        return "null"
    return {list: "array", str: "string", bool: "boolean"}.get(type(value), "number")
