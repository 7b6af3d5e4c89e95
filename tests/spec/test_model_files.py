"""Where a config is looked for, and what is said when it is not there or cannot be read."""

import json
import os
from pathlib import Path

import pytest

from castoff.errors import CastoffError
from castoff.spec.model import config_text, load_model
from castoff.spec.model_files import SHIPPED_DIRECTORY, find_config, hugging_face_cache

CACHE_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and working directory, so that no cache of this machine is found."""
    for variable in CACHE_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(folder)
    return folder


def snapshot(hub: Path, revision: str, *, model: str = "some/Model", hidden_size: int = 6144) -> Path:
    folder = hub / f"models--{model.replace('/', '--')}" / "snapshots" / revision
    folder.mkdir(parents=True)
    config = json.loads(config_text("glm52")) | {"hidden_size": hidden_size}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused(name: str) -> str:
    with pytest.raises(CastoffError) as caught:
        load_model(name)
    return str(caught.value)


class TestNames:
    def test_alias(self) -> None:
        assert load_model("glm52") == load_model("zai-org/GLM-5.2")
        assert load_model("glm52").name == "zai-org/GLM-5.2"

    def test_directory_and_file(self, tmp_path: Path) -> None:
        folder = tmp_path / "my-model"
        folder.mkdir()
        (folder / "config.json").write_text(config_text("glm52"))
        for path in (str(folder), f"{folder}/", str(folder / "config.json")):
            assert load_model(path).name == path
            assert load_model(path).hidden_size == 6144

    def test_relative_and_home_paths(self, home: Path) -> None:
        (home / "config.json").write_text(config_text("glm52"))
        for path in (".", "./config.json", "config.json", "~", "~/config.json"):
            assert load_model(path).num_hidden_layers == 78

    def test_a_byte_order_mark_is_no_error(self, home: Path) -> None:
        (home / "config.json").write_text(config_text("glm52"), encoding="utf-8-sig")
        assert load_model("config.json").num_hidden_layers == 78

    def test_a_shipped_id_needs_nothing_around_it(self, home: Path) -> None:
        assert find_config("zai-org/GLM-5").path.parent == SHIPPED_DIRECTORY

    @pytest.mark.parametrize(
        ("name", "suggestion"),
        [
            ("zai-org/glm-5.2", "zai-org/GLM-5.2"),
            ("GLM-5.2", "zai-org/GLM-5.2"),
            ("zai-org/GLM-5.3", "zai-org/GLM-5.2"),
            ("glm-52", "zai-org/GLM-5.2"),
            ("DeepSeek-V32", "deepseek-ai/DeepSeek-V3.2"),
        ],
    )
    def test_an_unknown_id_gets_a_suggestion(self, name: str, suggestion: str, home: Path) -> None:
        message = refused(name)
        assert f"unknown model '{name}'" in message
        assert suggestion in message.split("Did you mean")[1].split("?")[0]
        assert str(home / ".cache/huggingface/hub") in message
        assert "download the config first" in message

    @pytest.mark.parametrize("name", ["", " ", "meta-llama/Llama-3", "a/b/c", "x\0y", "a" * 5000, "-", "?*"])
    def test_an_unknown_id_without_a_suggestion(self, name: str) -> None:
        message = refused(name)
        assert message.startswith("unknown model ")
        assert "Did you mean" not in message
        assert "zai-org/GLM-5.2" in message

    @pytest.mark.parametrize(
        "name", ["/nowhere/model", "./model", "../model", "~/model", "~nobody-here/x", "conf.json"]
    )
    def test_a_path_that_is_not_there(self, name: str) -> None:
        assert refused(name).startswith(f"there is no file or directory '{name}'")


class TestUnreadable:
    def test_directory_without_config(self, home: Path) -> None:
        assert refused(str(home)) == f"the directory {home} has no config.json"

    def test_another_file(self, home: Path) -> None:
        (home / "model.safetensors").write_bytes(b"\0" * 100)
        assert refused("model.safetensors").startswith("model.safetensors is not a .json file")

    def test_a_directory_in_the_files_place(self, home: Path) -> None:
        (home / "config.json").mkdir()
        assert refused(".") == "cannot read config.json: Is a directory"

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            (b"", "is not valid JSON, or was cut short: Expecting value (line 1, column 1)"),
            (b'{"model_type": "glm_moe_dsa", "hid', "was cut short: Unterminated string"),
            (b'{"model_type": ', "was cut short"),
            (b"<html>404</html>", "is not valid JSON"),
            (b"[" * 100_000, "is not a usable config"),
            (b'{"hidden_size": ' + b"1" * 5000 + b"}", "is not a usable config"),
            (b"[1, 2]", "holds a JSON array; a config.json is an object"),
            (b'"text"', "holds a JSON string"),
            (b"null", "holds a JSON null"),
            (b"true", "holds a JSON boolean"),
            (b"3", "holds a JSON number"),
            (b"\xff\xfe{\0}\0", "is not a JSON file: byte 0 is not UTF-8"),
            (b'{"a": "\xe9"}', "byte 7 is not UTF-8"),
            (b"{}", "model_type is missing"),
        ],
    )
    def test_content(self, home: Path, content: bytes, said: str) -> None:
        path = home / "config.json"
        path.write_bytes(content)
        message = refused(str(path))
        assert message.startswith(str(path))
        assert said in message

    def test_permission(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def deny(_: Path) -> bytes:
            raise PermissionError(13, "Permission denied")

        # Not by chmod: the tests may run as root, which may read everything.
        (home / "config.json").write_text("{}")
        monkeypatch.setattr(Path, "read_bytes", deny)
        assert refused(".") == "cannot read config.json: Permission denied"

    def test_permission_of_the_directory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = Path.stat

        def deny(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
            if path.is_relative_to("/locked"):
                raise PermissionError(13, "Permission denied")
            return original(path, follow_symlinks=follow_symlinks)

        monkeypatch.setattr(Path, "stat", deny)
        assert refused("/locked/model") == "cannot read /locked/model: Permission denied"


class TestHuggingFaceCache:
    def test_place(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert hugging_face_cache() == home / ".cache/huggingface/hub"
        # Each variable takes precedence over those before.
        for variable, value, place in (
            ("XDG_CACHE_HOME", "/xdg", "/xdg/huggingface/hub"),
            ("HF_HOME", "~/hf", str(home / "hf/hub")),
            ("HUGGINGFACE_HUB_CACHE", "/old", "/old"),
            ("HF_HUB_CACHE", "~/new", str(home / "new")),
        ):
            monkeypatch.setenv(variable, value)
            assert hugging_face_cache() == Path(place)
        for variable in CACHE_VARIABLES:
            monkeypatch.setenv(variable, "")
        assert hugging_face_cache() == home / ".cache/huggingface/hub"

    def test_the_revision_of_main(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        old = snapshot(tmp_path, "aaa", hidden_size=1024)
        snapshot(tmp_path, "bbb", hidden_size=2048)
        refs = old.parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_text("aaa\n")
        spec = load_model("some/Model")
        assert (spec.name, spec.hidden_size) == ("some/Model", 1024)

    @pytest.mark.parametrize("ref", [None, "gone"])
    def test_else_the_newest_snapshot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ref: str | None) -> None:
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        hub = tmp_path / "hub"
        newer = snapshot(hub, "aaa", hidden_size=1024)
        older = snapshot(hub, "bbb", hidden_size=2048)
        os.utime(newer, (2000, 2000))
        os.utime(older, (1000, 1000))
        # A newer one without config.json does not count.
        (hub / "models--some--Model" / "snapshots" / "ccc").mkdir()
        if ref:
            (hub / "models--some--Model" / "refs").mkdir()
            (hub / "models--some--Model" / "refs" / "main").write_text(ref)
        assert load_model("some/Model").hidden_size == 1024

    def test_a_name_without_organisation(self, home: Path) -> None:
        snapshot(home / ".cache/huggingface/hub", "aaa", model="Model")
        assert load_model("Model").hidden_size == 6144

    def test_a_model_without_config_is_unknown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        (tmp_path / "models--some--Model" / "snapshots" / "aaa").mkdir(parents=True)
        assert refused("some/Model").startswith("unknown model 'some/Model'")

    def test_a_spoilt_reference(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        refs = snapshot(tmp_path, "aaa").parent.parent / "refs"
        refs.mkdir()
        (refs / "main").write_bytes(b"\xff")
        assert "refs/main is not" in refused("some/Model")

    def test_a_shipped_id_wins(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        snapshot(tmp_path, "aaa", model="zai-org/GLM-5.2", hidden_size=1024)
        assert load_model("zai-org/GLM-5.2").hidden_size == 6144
