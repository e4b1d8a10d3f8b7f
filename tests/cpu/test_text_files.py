"""A checkpoint's small files are opened before a byte is packed; pipes and devices are not waited for."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import BrokenModel
from penstock.serve.llm import LLM
from tests.cpu.checkpoints import LLAMA, save_checkpoint, save_tokenizer
from tests.cpu.commands import MACHINE, Call, apart, dump_machine, here, machine_cache, refused

CONFIG = {**LLAMA, "vocab_size": 300}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact") / "source"
    save_checkpoint(folder, CONFIG)
    save_tokenizer(folder, CONFIG)
    return folder


@pytest.fixture
def source(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "source"))


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return made


def a_pipe(name: str) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return made


def a_link(name: str, to: str) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return made


def long(name: str) -> Callable[[Path], None]:
    def made(folder: Path) -> None:
        with (folder / name).open("r+b" if (folder / name).exists() else "wb") as stream:
            stream.truncate(1 << 40)

    return made


def template(text: object) -> Callable[[Path], None]:
    return written("tokenizer_config.json", json.dumps({"chat_template": text}))


BROKEN = {
    "tokenizer cut": (written("tokenizer.json", "{"), "is not a tokenizer"),
    "tokenizer a pipe": (a_pipe("tokenizer.json"), "it is a pipe, not a regular file"),
    "tokenizer endless": (a_link("tokenizer.json", "/dev/zero"), "it is a device, not a regular file"),
    "tokenizer not downloaded": (a_link("tokenizer.json", "../blobs/gone"), "tokenizer.json is missing"),
    "tokenizer of a TiB": (long("tokenizer.json"), "has 1099511627776 bytes"),
    "settings": (written("tokenizer_config.json", "[]"), "should hold a JSON object"),
    "settings of a TiB": (long("tokenizer_config.json"), "has 1099511627776 bytes"),
    "settings a pipe": (a_pipe("tokenizer_config.json"), "it is a pipe"),
    "sampling defaults cut": (written("generation_config.json", "{"), "generation_config.json is not JSON"),
    "sampling defaults": (written("generation_config.json", '{"top_p": 7}'), "generation_config.json: top_p is 7"),
    "sampling defaults a pipe": (a_pipe("generation_config.json"), "it is a pipe"),
    "sampling defaults a folder": (a_link("generation_config.json", "."), "it is a folder"),
    "eos": (written("generation_config.json", '{"eos_token_id": "2"}'), "eos_token_id is '2'"),
    "special tokens": (written("special_tokens_map.json", "7"), "should hold a JSON object"),
    "template not UTF-8": (written("chat_template.jinja", b"\xff"), "chat_template.jinja is not UTF-8"),
    "template a pipe": (a_pipe("chat_template.jinja"), "it is a pipe"),
    "template of a TiB": (long("chat_template.jinja"), "has 1099511627776 bytes"),
}  # fmt: skip
# Of a chat template that cannot be read as one, who goes without it need not know.
BAD_TEMPLATES = {
    "template": (template("{% if %}"), "chat template 'default' cannot be parsed"),
    "template in a file": (written("chat_template.jinja", "{{"), "chat template 'default' cannot be parsed"),
    "one of several": (
        template([{"name": "default", "template": "{{ messages }}"}, {"name": "rag", "template": "{% for %}"}]),
        "chat template 'rag' cannot be parsed",
    ),
    "template deep": (template("{% if a %}" * 5000 + "{% endif %}" * 5000), "cannot be parsed"),
    "template that multiplies": (template("{{ 'x' * 10**10 }}"), "rendering a chat with it takes more than"),
}


@pytest.mark.parametrize("name", BROKEN | BAD_TEMPLATES)
def test_before_a_byte_is_packed(name: str, call: Call, capsys: pytest.CaptureFixture[str], source: Path) -> None:
    """By `run`, which packs on first use, and by `pack`: the same line, and nothing left behind."""
    breaks, says = (BROKEN | BAD_TEMPLATES)[name]
    breaks(source)
    cache = source.parent / "cache"
    error = refused(call("run", source, "hi", "--cache", cache), says, "BrokenModel")
    assert not list(cache.glob("models/*"))
    again = refused(here(capsys, "pack", source, source.parent / "packed", "--json"), says, "BrokenModel")
    assert again["message"] == error["message"]
    assert {path.name for path in source.parent.iterdir()} <= {"source", "cache"}


def test_a_template_that_refuses_the_trial_is_packed(call: Call, source: Path) -> None:
    """It may take other conversations; what it says of this one comes when it is asked."""
    template("{{ raise_exception('a system message, please') }}")(source)
    cache = source.parent / "cache"
    refused(call("run", source, "hi", "--cache", cache), "a system message, please", "BadRequest")
    assert not list(cache.glob("models/*"))  # a prompt that is refused packs nothing
    assert call("pack", source, source.parent / "packed").code == 0
    machine_cache(cache)
    assert call("run", source, "hi", "--raw", "--max-tokens", "1", "--cache", cache).code == 0
    assert len(list(cache.glob("models/*/penstock.json"))) == 1


@pytest.mark.parametrize("name", BAD_TEMPLATES)
def test_without_the_template_it_runs(name: str, call: Call, source: Path) -> None:
    BAD_TEMPLATES[name][0](source)
    assert call("run", source, "hi", "--raw", "--max-tokens", 2).code == 0


def test_a_checkpoint_without_a_tokenizer(
    call: Call, capsys: pytest.CaptureFixture[str], source: Path, cache: Path
) -> None:
    """It can be packed, and planned for; who wants to run it, or to score a text, is told before it is packed."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).unlink()
    (source / "text").write_text("some text")
    for command in (("run", source, "hi"), ("eval", source, source / "text"), ("bench", source)):
        refused(call(*command, "--cache", source.parent / "cache"), "has no tokenizer.json", "BrokenModel")
    assert not list(source.parent.glob("cache/models/*"))
    with pytest.raises(BrokenModel, match=r"has no tokenizer\.json"):
        LLM(source, cache=source.parent / "cache")
    assert here(capsys, "pack", source, source.parent / "packed").code == 0
    assert call("plan", source).code == 0
    (source / "generation_config.json").write_text('{"top_p": 7}')
    refused(here(capsys, "pack", source, source.parent / "again", "--json"), "top_p is 7")


def test_a_byte_order_mark(call: Call, source: Path, cache: Path) -> None:
    """Some editors put it before every text that they save."""
    for file in source.glob("*.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    args = ("run", source, "hi", "--max-tokens", 2, "--ignore-eos")
    done = call(*args)
    assert done.code == 0 and done.report["output_tokens"] == 2
    plan, machine = source.parent / "plan", source.parent / "machine"
    plan.write_text(call("plan", source).out, encoding="utf-8-sig")
    machine.write_text(dump_machine(MACHINE), encoding="utf-8-sig")
    assert call(*args, "--plan", plan).report["token_ids"] == done.report["token_ids"]
    assert call("plan", source, "--machine", machine).code == 0


# --- pipes, devices and long files where a text or weights should be -------------------------------------------------


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("flag", ["--plan", "--machine", "a text", "a config", "a model"])
@pytest.mark.parametrize("what", ["pipe", "/dev/zero", "long"])
def test_a_text_that_never_ends(flag: str, what: str, call: Call, model: Path, pipe: Path, tmp_path: Path) -> None:
    if what == "long":
        long("long")(tmp_path)
    file: object = {"pipe": pipe, "long": tmp_path / "long"}.get(what, what)
    commands = {
        "--plan": ("run", model, "hi", "--plan", file),
        "--machine": ("plan", model, "--machine", file),
        "a text": ("eval", model, file),
        "a config": ("plan", file),
        "a model": ("run", file, "hi"),
    }
    says = "has 1099511627776 bytes; at most 16" if what == "long" else "not a regular file"
    refused(call(*commands[flag]), says)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("breaks", [a_pipe, lambda name: a_link(name, "/dev/zero"), lambda name: a_link(name, "pipe")])
def test_a_checkpoint_of_pipes(
    name: str, breaks: Callable[[str], Callable[[Path], None]], capsys: pytest.CaptureFixture[str], source: Path
) -> None:
    if name.endswith("index.json"):
        (source / "model.safetensors").unlink()
    os.mkfifo(source / "pipe")
    breaks(name)(source)
    done = here(capsys, "pack", source, source.parent / "packed", "--json")
    refused(done, "not a regular file", "BrokenModel")
    assert [path.name for path in source.parent.iterdir()] == ["source"]


def test_a_shard_that_is_a_pipe(capsys: pytest.CaptureFixture[str], source: Path) -> None:
    (source / "model.safetensors").unlink()
    os.mkfifo(source / "part")
    (source / "model.safetensors.index.json").write_text('{"weight_map": {"a": "part"}}')
    refused(here(capsys, "pack", source, source.parent / "packed", "--json"), "it is a pipe", "BrokenModel")


@pytest.mark.parametrize("name", ["config.json", "penstock.json", "model-00001.safetensors", "tokenizer.json"])
def test_a_packed_model_of_pipes(name: str, call: Call, model: Path, tmp_path: Path) -> None:
    packed = Path(shutil.copytree(model, tmp_path / "packed"))
    a_pipe(name)(packed)
    refused(call("run", packed, "hi"), "it is a pipe", "BrokenModel")


def test_a_cache_of_pipes(call: Call, model: Path, cache: Path, tmp_path: Path) -> None:
    """The history is as if there were none."""
    folder = Path(shutil.copytree(cache, tmp_path / "cache"))
    (machine,) = folder.glob("machines/*.json")
    os.mkfifo(machine.with_suffix(".runs.jsonl"))
    for _ in range(2):
        done = call("run", model, "hi", "--max-tokens", 8, "--ignore-eos", "--cache", folder)
        assert done.code == 0 and call("plan", model, "--cache", folder).code == 0
    assert machine.with_suffix(".runs.jsonl").is_file()


def test_a_prompt_that_never_ends(model: Path, cache: Path) -> None:
    with open("/dev/zero", "rb") as endless:
        done = apart("run", model, "--json", "--cache", cache, stdin=endless)
    refused(done, "does not end within 16.0 MiB", "BadRequest")
