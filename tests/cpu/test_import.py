"""Models that Ollama and LM Studio keep here: found, listed, run in place; their manifests are other people's files."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("gguf", reason="the package gguf, which writes GGUF, is not installed")

from penstock.errors import BadRequest, PenstockError
from penstock.hubs import lm_studio, ollama
from penstock.hubs.where import Where, lm_studio_folders
from penstock.serve.named import locate, to_plan
from tests.cpu import gguf_models
from tests.cpu.checkpoints import LLAMA, save_checkpoint, save_tokenizer
from tests.cpu.commands import ROOT, apart, machine_cache

TALE = ROOT / "penstock/assets/tale-llama"
MODEL = "application/vnd.ollama.image.model"


@pytest.fixture(scope="module")
def tale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tale") / "tale-Q4_0.gguf"
    words = gguf_models.tokenizer_metadata(TALE, "gpt-2")
    gguf_models.convert(TALE, file, lambda _: gguf_models.Kind.Q4_0, words)
    return file


class Store:
    """Ollama's folder of models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "blobs").mkdir(parents=True)

    def blob(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        (self.folder / "blobs" / f"sha256-{digest}").write_bytes(content)
        return f"sha256:{digest}"

    def layer(self, kind: str, content: bytes) -> dict[str, Any]:
        return {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": self.blob(content), "size": len(content)}

    def manifest(self, path: str, content: object) -> None:
        file = self.folder / "manifests" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())

    def model(self, path: str, *layers: dict[str, Any]) -> None:
        self.manifest(path, {"schemaVersion": 2, "config": {}, "layers": list(layers)})

    @property
    def where(self) -> Where:
        return Where(ollama=(self.folder,), lm_studio=())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


HOME = "registry.ollama.ai/library"


def test_models_are_listed_and_found(store: Store, tale: Path) -> None:
    model = store.layer("model", tale.read_bytes())
    others = store.layer("template", b"{{ .Prompt }}"), store.layer("params", b'{"stop":["<|x|>"]}')
    store.model(f"{HOME}/tale/1b", model, *others)
    store.model(f"{HOME}/tale/latest", model)
    store.model("registry.ollama.ai/me/tale/v2", model)
    store.model("hf.co/me/Tale-GGUF/Q4_0", model)
    found = {each.name: each for each in ollama.listed(store.where)}
    assert list(found) == [
        "ollama:hf.co/me/Tale-GGUF:Q4_0", "ollama:tale:1b", "ollama:tale:latest", "ollama:me/tale:v2"
    ]  # fmt: skip
    assert found["ollama:tale:1b"].left_out == (
        "its template (the model file's own chat template is used), its parameters (stop, temperature)"
    )
    assert found["ollama:tale:latest"].left_out == "" and found["ollama:tale:1b"].short == "tale-1b"
    assert found["ollama:tale:1b"].nbytes > tale.stat().st_size > 10_000
    for text in (*found, "ollama:tale", "ollama:registry.ollama.ai/library/tale:1b"):
        told: list[str] = []
        located = locate(text, store.where, lambda line, *_, told=told: told.append(line))
        assert located.path.read_bytes() == tale.read_bytes() and located.path.parent.name == "blobs"
        assert bool(told) == ("1b" in text) and (not told or "not used of what Ollama has beside it" in told[0])
    with to_plan("ollama:tale", store.where) as path:
        assert path.is_file()


@pytest.mark.parametrize(
    ("text", "says"),
    {
        "ollama:none": "is not on this machine: there are ollama:tale:latest",
        "ollama:": "is no name of Ollama's",
        "ollama:../../x": "is no name of Ollama's",
        "ollama:a/b/c/d:e": "is no name of Ollama's",
        "ollama:tale/..:latest": "is no name of Ollama's",
        "ollama:/etc:passwd": "is no name of Ollama's",
        "ollama:t\nale": "is no name of Ollama's",
    }.items(),
)
def test_names_that_are_refused(text: str, says: str, store: Store) -> None:
    store.model(f"{HOME}/tale/latest", store.layer("model", b"GGUF"))
    with pytest.raises(BadRequest) as refusal:
        locate(text, store.where)
    assert says in refusal.value.message


def outside(store: Store) -> object:
    """A blob that is a link out of the store."""
    layer = store.layer("model", b"GGUF" + bytes(100))
    blob = store.folder / "blobs" / layer["digest"].replace(":", "-")
    elsewhere = store.folder.parent / "secret"
    blob.rename(elsewhere)
    blob.symlink_to(elsewhere)
    return {"layers": [layer]}


BAD: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "is not JSON"),
    "a list": (b"[]", "should hold a JSON object"),
    "nothing": ({}, "lists no layers"),
    "too long": (b" " * ((1 << 20) + 1), "at most 1048576 make sense"),
    "too many layers": ({"layers": [{}] * 101}, "lists no layers, or more than 100"),
    "layers that are none": ({"layers": [5]}, "a layer without a kind and a digest"),
    "a digest that leads out": (
        {"layers": [{"mediaType": MODEL, "digest": "sha256:../../../etc/passwd", "size": 5}]}, "without a kind and a",
    ),
    "a digest of another kind": ({"layers": [{"mediaType": MODEL, "digest": "md5:00", "size": 5}]}, "without a kind"),
    "a size": ({"layers": [{"mediaType": MODEL, "digest": "sha256:" + "0" * 64, "size": 1e30}]}, "a layer of 1e+30"),
    "no blob": ({"layers": [{"mediaType": MODEL, "digest": "sha256:" + "0" * 64, "size": 5}]}, "is missing: `ollama"),
    "a blob elsewhere": (outside, "outside of Ollama's folder"),
    "an adapter": (
        lambda store: {"layers": [store.layer("model", b"GGUF"), store.layer("adapter", b"x")]}, "has an adapter",
    ),
    "two models": (
        lambda store: {"layers": [store.layer("model", b"GGUF"), store.layer("model", b"GGUF2")]}, "2 files of weights",
    ),
    "in the cloud": ({"layers": []}, "it runs elsewhere"),
    "tensors": (lambda store: {"layers": [store.layer("tensor", b"x")]}, "its tensors lie apart"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "says"), BAD.values(), ids=BAD)
def test_manifests_that_are_refused(content: Any, says: str, store: Store) -> None:
    store.manifest(f"{HOME}/tale/latest", content(store) if callable(content) else content)
    (found,) = ollama.listed(store.where)
    assert found.path is None and says in found.why
    with pytest.raises(BadRequest, match="cannot be run"):
        locate("ollama:tale", store.where)


def test_no_file_but_a_manifest_is_read(store: Store) -> None:
    """Links to folders are not followed, a pipe is not waited for."""
    (store.folder / "manifests/registry.ollama.ai/library/a").mkdir(parents=True)
    (store.folder / "manifests/loop").symlink_to(store.folder / "manifests")
    os.mkfifo(store.folder / "manifests/registry.ollama.ai/library/a/pipe")
    (store.folder / "manifests/registry.ollama.ai/library/a/.hidden").write_bytes(b"")
    (store.folder / "manifests/registry.ollama.ai/shallow").write_bytes(b"{}")
    (found,) = ollama.listed(store.where)
    assert found.name == "ollama:a:pipe" and "it is a pipe" in found.why
    assert not list(ollama.listed(Where(ollama=(store.folder / "none",), lm_studio=())))


def test_a_folder_that_cannot_be_read(store: Store, tmp_path: Path) -> None:
    """As that of the system's service, where this user has none of its rights."""
    closed = tmp_path / ("x" * 300)
    store.model(f"{HOME}/tale/latest", store.layer("model", b"GGUF"))
    where = Where(ollama=(closed, store.folder), lm_studio=())
    assert locate("ollama:tale", where).name == "tale-latest"
    with pytest.raises(BadRequest, match=r"is not on this machine: there are ollama:tale:latest; .*x cannot be read: "):
        locate("ollama:none", where)


LAYER = st.fixed_dictionaries({}, optional={
    "mediaType": st.just(MODEL) | st.text(max_size=5) | st.none(), "size": st.integers() | st.floats() | st.none(),
    "digest": st.just("sha256:" + "0" * 64) | st.text(max_size=9) | st.none(),
})  # fmt: skip


@given(content=st.fixed_dictionaries({"layers": st.lists(LAYER | st.integers(), max_size=4) | st.none() | st.text()}))
def test_any_manifest_is_listed_or_told(content: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = Store(tmp_path_factory.mktemp("store") / "models")
    store.manifest(f"{HOME}/tale/latest", json.dumps(content).encode())
    (found,) = ollama.listed(store.where)
    assert found.path is None and found.why and "\n" not in found.why


# --- LM Studio -----------------------------------------------------------------------------------------------------


def test_lm_studio(tmp_path: Path, tale: Path) -> None:
    folder = tmp_path / "lm"
    (folder / "me/one").mkdir(parents=True)
    os.link(tale, folder / "me/one/tale-Q4_0.gguf") if tale.stat().st_dev == folder.stat().st_dev else (
        folder / "me/one/tale-Q4_0.gguf"
    ).write_bytes(tale.read_bytes())
    (folder / "me/one/mmproj-tale.gguf").write_bytes(b"GGUF")
    (folder / "me/two").mkdir()
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (folder / "me/two" / name).write_bytes(b"GGUF")
    config = {**LLAMA, "vocab_size": 300}
    save_checkpoint(folder / "me/folder", config)
    save_tokenizer(folder / "me/folder", config)
    (folder / "me/empty").mkdir()
    for name in ("my model", "na--me", "v1.git"):  # no name on the Hub
        (folder / "me" / name).mkdir()
        (folder / "me" / name / " x.gguf").write_bytes(b"GGUF")
    where = Where(ollama=(), lm_studio=(tmp_path / "none", folder))
    found = {each.name: each for each in lm_studio.listed(where)}
    assert list(found) == [
        "lmstudio:me/empty", "lmstudio:me/folder", "lmstudio:me/my model", "lmstudio:me/na--me", "lmstudio:me/one",
        "lmstudio:me/two/a-Q4_0.gguf", "lmstudio:me/two/a-Q8_0.gguf", "lmstudio:me/v1.git",
    ]  # fmt: skip
    assert found["lmstudio:me/empty"].path is None
    for name, each in found.items():
        if each.path is not None:
            assert locate(name, where).path == each.path
    assert locate("lmstudio:me/two:Q8_0", where).path == folder / "me/two/a-Q8_0.gguf"
    for text, says in {
        "lmstudio:me/two": "has 2 GGUF files: write lmstudio:me/two:Q4_0 or lmstudio:me/two/FILE",
        "lmstudio:me/none": "is not on this machine: there are lmstudio:me/empty, ",
        "lmstudio:none": "is no name of LM Studio's",
        "lmstudio:../x": "is no name of LM Studio's",
        "lmstudio:me/one:main2": "is not on this machine: there are",
        "lmstudio:me/one/../../x.gguf": "is no name of LM Studio's",
    }.items():
        with pytest.raises(PenstockError, match=says):
            locate(text, where)


def test_lm_studio_keeps_models_where_its_user_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen folder counts first; LM Studio's home may be another one too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    usual = tmp_path / ".lmstudio/models", tmp_path / ".cache/lm-studio/models"
    assert lm_studio_folders(Where()) == usual
    chosen, old, home = tmp_path / "große Platte", tmp_path / "old", tmp_path / "elsewhere"
    for folder, names in ((usual[0], ("one", "two")), (chosen, ("two", "three")), (home / "models", ("four",))):
        for model in names:
            (folder / "me" / model).mkdir(parents=True)
            (folder / "me" / model / "x.gguf").write_bytes(b"GGUF")
    write_settings(tmp_path / ".lmstudio", {"downloadsFolder": str(chosen), "language": "de"})
    write_settings(tmp_path / ".cache/lm-studio", {"downloadsFolder": str(old)})
    assert lm_studio_folders(Where()) == (chosen, usual[0], old, usual[1])
    assert locate("lmstudio:me/two", Where(ollama=())).path == chosen / "me/two/x.gguf"
    assert locate("lmstudio:me/one", Where(ollama=())).path == usual[0] / "me/one/x.gguf"
    (tmp_path / ".lmstudio-home-pointer").write_text(f"{home}\n")
    assert lm_studio_folders(Where())[:2] == (home / "models", chosen)
    assert [each.name for each in lm_studio.listed(Where())] == [
        "lmstudio:me/four",
        "lmstudio:me/three",
        "lmstudio:me/two",
        "lmstudio:me/one",
    ]
    assert lm_studio_folders(Where(lm_studio=(old,))) == (old,)


def write_settings(home: Path, content: object) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "settings.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff", b"[" * 100_000, {"downloadsFolder": None}, {"downloadsFolder": ["/tmp"]}, {},
        {"downloadsFolder": ""}, {"downloadsFolder": "models"}, {"downloadsFolder": "~/models"},
        {"downloadsFolder": "/tmp\0x"}, {"downloadsFolder": "/\ud800"},
        b'{"downloadsFolder": "/tmp"}' + b" " * (1 << 20),
    ],
    ids=lambda content: repr(content)[:30],
)  # fmt: skip
def test_settings_that_name_no_folder(content: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_settings(tmp_path / ".lmstudio", content)
    (tmp_path / ".lmstudio-home-pointer").write_bytes(content if isinstance(content, bytes) else b"elsewhere")
    assert lm_studio_folders(Where()) == (tmp_path / ".lmstudio/models", tmp_path / ".cache/lm-studio/models")


def test_settings_that_are_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for a pipe; a chosen folder may be a file, closed, gone, or too long a name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".lmstudio").mkdir()
    os.mkfifo(tmp_path / ".lmstudio/settings.json")
    os.mkfifo(tmp_path / ".lmstudio-home-pointer")
    (tmp_path / "file").write_bytes(b"GGUF")
    write_settings(tmp_path / ".cache/lm-studio", {"downloadsFolder": str(tmp_path / "file")})
    assert lm_studio_folders(Where())[1] == tmp_path / "file" and not list(lm_studio.listed(Where()))
    for folder in (tmp_path / "gone", tmp_path / ("x" * 300)):
        write_settings(tmp_path / ".cache/lm-studio", {"downloadsFolder": str(folder)})
        assert not list(lm_studio.listed(Where()))
        with pytest.raises(BadRequest, match="LM Studio keeps none in its folders"):
            locate("lmstudio:me/one", Where(ollama=()))


# --- commands ------------------------------------------------------------------------------------------------------


def test_commands(store: Store, tale: Path, tmp_path: Path) -> None:
    store.model(f"{HOME}/tale/1b", store.layer("model", tale.read_bytes()), store.layer("template", b"{{ .Prompt }}"))
    store.model(f"{HOME}/broken/latest", store.layer("model", b"GGUF" + bytes(30)))
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "OLLAMA_MODELS": str(store.folder)}
    listed = apart("import", "ollama", env=environment)
    assert listed.code == 0, listed.err
    head, broken, good = listed.out.splitlines()
    assert head.split() == ["name", "format", "size", "runs"]
    assert good.split() == ["ollama:tale:1b", "q4_0", "3.70", "MiB", "yes"] or good.endswith("yes"), good
    assert broken.startswith("ollama:broken:latest") and " no: ollama:broken:latest " in broken
    report = apart("import", "--json", env=environment).report["models"]
    assert [each["runs"] for each in report] == [False, True] and report[1]["path"].startswith(str(store.folder))
    flags = ("--cache", machine_cache(tmp_path / "cache"), "--json")
    run = apart("run", "ollama:tale:1b", "Once upon a time", "--max-tokens", 8, *flags, env=environment)
    assert run.code == 0 and run.report["output_tokens"] == 8, run.err
    assert "penstock: ollama:tale:1b: not used of what Ollama has beside it: its template" in run.err
    assert next((tmp_path / "cache/models").iterdir()).name.startswith("tale-1b-")
    of_file = apart("run", tale, "Once upon a time", "--max-tokens", 8, *flags, env=environment)
    assert of_file.report["token_ids"] == run.report["token_ids"]
    for command, *more in (("plan",), ("run", "hi"), ("pack", tmp_path / "packed")):
        for model in ("tale:1b", "broken:latest"):
            refused = apart(command, f"ollama:{model}", *more, "--weights", "int4", env=environment)
            assert refused.code == 2 and f"penstock: ollama:{model}" in refused.err and "blobs" not in refused.err
            assert "is quantised (q4_0)" in refused.err or model == "broken:latest", refused.err
    assert "keeps no models that penstock knows of" in apart("import", "vllm", env=environment).err
    nothing = apart("import", env={**environment, "OLLAMA_MODELS": "", "HOME": str(tmp_path / "empty")})
    assert nothing.code == 0 and "no models in" in nothing.err and nothing.out == ""
