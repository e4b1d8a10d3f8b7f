"""Models of the Hub are planned by headers, and commands take their names."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BadRequest, BrokenModel, PenstockError
from penstock.hubs.headers import peek
from penstock.hubs.where import Where
from penstock.serve.named import locate, to_plan
from penstock.serve.planning import describe
from tests.cpu.hub.cases import CONFIG, INDEX, NOT_WANTED, name_of
from tests.cpu.hub.server import FakeHub, Fault, git_digest

# --- planning ------------------------------------------------------------------------------------------------------


def test_a_plan_needs_only_the_config(hub: FakeHub, where: Where, files: dict[str, bytes]) -> None:
    with to_plan("org/name", where) as path:
        spec, fmt = describe(path, to_plan=True)
        assert path.name != "name" and len(spec.layers) == 2 and fmt.name == "float32"
        assert spec.tokenizer_bytes > 0
    assert not path.exists()
    asked = [path for path in hub.paths() if "resolve" in path or "stored" in path]
    assert [path.rpartition("/")[2] for path in asked] == [INDEX, "config.json"]


def test_headers_are_read_where_the_config_says_too_little(hub: FakeHub, where: Where) -> None:
    from penstock.store.checkpoint import Checkpoint

    said = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    hub.repos["org/name"]["config.json"] = json.dumps(said).encode()
    with peek(name_of(), where) as peeked:
        total = sum(map(len, hub.repos["org/name"].values())) - sum(map(len, NOT_WANTED.values()))
        assert peeked.nbytes == total
        with Checkpoint.open(peeked.path) as checkpoint:
            assert checkpoint.find("model.norm.weight").shape == (72,)
        status = [file.stat() for file in peeked.path.glob("*.safetensors")]
        assert sum(each.st_size for each in status) > 200_000
    assert not any("range" not in headers for _, path, headers in hub.seen if "stored" in path)


@pytest.mark.parametrize("name", ["gptq", "awq", "float8-blocks"])
def test_a_plan_of_a_quantised_folder_is_that_of_its_files(
    name: str, hub: FakeHub, where: Where, tmp_path: Path
) -> None:
    """Its formats follow from its headers, of which none of the weights are needed."""
    from tests.cpu import quantised
    from tests.cpu.oracle import save
    from tests.cpu.test_quantised import CASES

    variant, quantise, config, _ = CASES[name]
    save(variant, tmp_path / "plain")
    folder = quantised.write(tmp_path / "plain", tmp_path / "folder", quantise, config)
    hub.repos["org/quantised"] = {file.name: file.read_bytes() for file in folder.iterdir()}
    with peek(name_of("org/quantised"), where) as peeked:
        assert describe(peeked.path, to_plan=True)[1] == describe(folder, to_plan=True)[1]
        assert peeked.read_bytes < peeked.nbytes / 2


def test_errors_of_a_plan_call_the_model_by_its_name(hub: FakeHub, where: Where) -> None:
    hub.repos["org/name"]["config.json"] = b"{no json"
    with pytest.raises(BrokenModel, match=r"^org/name/config\.json is not JSON"), to_plan("org/name", where):
        pass
    hub.repos["org/name"]["config.json"] = b'{"model_type": "strange", "dtype": "float32"}'
    with pytest.raises(PenstockError, match=r"^org/name/config\.json"), to_plan("org/name", where) as path:
        describe(path)


# --- GGUF ----------------------------------------------------------------------------------------------------------


def test_a_plan_of_a_gguf_file_needs_its_header(hub: FakeHub, where: Where, ggufs: dict[str, bytes]) -> None:
    hub.repos["org/gguf"] = {**ggufs, "config.json": b"{}", "README.md": b"#"}
    with pytest.raises(BadRequest, match="org/gguf has 2 GGUF files: write org/gguf:Q4_0 or org/gguf/FILE; Q4_0 "):
        locate("org/gguf", where)
    hub.seen.clear()
    with peek(name_of("org/gguf:Q8_0"), where) as peeked:
        spec, fmt = describe(peeked.path, to_plan=True)
        assert fmt.name.startswith("q8_0") and len(spec.layers) == 8
        assert peeked.read_bytes <= 2 << 20 < peeked.nbytes == len(ggufs["tale-Q8_0.gguf"])
        holes = peeked.path.stat()
        assert holes.st_size == peeked.nbytes and holes.st_blocks * 512 < peeked.read_bytes + (1 << 16)
    located = locate("org/gguf:Q4_0", where)
    assert located.path.name == "tale-Q4_0.gguf" and located.path.read_bytes() == ggufs["tale-Q4_0.gguf"]
    assert {path.name for path in located.path.parent.iterdir()} == {"tale-Q4_0.gguf"}
    assert locate("org/gguf", where).path == located.path  # the one that is here


def test_a_plan_of_several_gguf_files(
    hub: FakeHub, environment: dict[str, str], ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    """One vocabulary is read; each file is planned as by its own header."""
    from tests.cpu.commands import apart, machine_cache, refused

    flags, cache = ("--json",), machine_cache(tmp_path / "cache")
    files = {**ggufs, "tale-IQ2_M.gguf": b"GGUF" + bytes(400_000), "other-Q6_K.gguf": ggufs["tale-Q8_0.gguf"][:90_000]}
    hub.repos["org/gguf"] = files
    planned = apart("plan", "org/gguf", *flags, "--cache", cache, env=environment)
    assert planned.code == 0, planned.err
    assert "penstock: org/gguf has 4 GGUF files: write org/gguf:" in planned.err
    found = {each["quantisation"]: each for each in planned.report["files"]}
    assert list(found) == ["Q6_K", "IQ2_M", "Q4_0", "Q8_0"]
    assert "is truncated" in found["Q6_K"]["why"] or "is not made as" in found["Q6_K"]["why"]
    assert "is not made as tale-Q4_0.gguf is" in found["IQ2_M"]["why"]
    assert found["Q4_0"]["why"] is None and found["Q4_0"]["predicted"]["decode_tokens_per_s"] > 0
    shown = apart("plan", "org/gguf", "--cache", cache, env=environment)
    assert shown.code == 0 and [line.split()[0] for line in shown.out.splitlines()[1:]] == list(found)
    hub.repos["org/gguf"] = ggufs
    hub.seen.clear()
    planned = apart("plan", "org/gguf", *flags, "--cache", cache, env=environment)
    each = {each["quantisation"]: each["predicted"] for each in planned.report["files"]}
    assert all(each.values()), planned.out
    read = [headers["range"] for _, path, headers in hub.seen if "stored" in path]
    assert len(read) == 2
    for quantisation, predicted in each.items():
        alone = apart("plan", f"org/gguf:{quantisation}", *flags, "--cache", cache, env=environment)
        assert predicted["decode_tokens_per_s"] == alone.report["predicted"]["decode_tokens_per_s"] > 0
    assert each["Q4_0"]["decode_tokens_per_s"] > each["Q8_0"]["decode_tokens_per_s"]
    refused(apart("plan", "org/gguf", "--compare", *flags, env=environment), "org/gguf has 2 GGUF files", "BadRequest")


def test_a_plan_of_gguf_files_that_are_split(
    hub: FakeHub, environment: dict[str, str], ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    """Beside whole ones, and alone: each is planned as by its own headers."""
    from tests.cpu import gguf_models
    from tests.cpu.commands import ROOT, apart, machine_cache

    tale, cache = ROOT / "penstock/assets/tale-llama", machine_cache(tmp_path / "cache")
    words = gguf_models.tokenizer_metadata(tale, "gpt-2")
    split: dict[str, dict[str, bytes]] = {}
    for kind in (gguf_models.Kind.BF16, gguf_models.Kind.Q8_0):
        folder = tmp_path / kind.name
        folder.mkdir()
        file = folder / f"tale-a-rather-long-name-{kind.name}.gguf"
        gguf_models.convert(tale, file, lambda _, kind=kind: kind, words, split_max_tensors=30)
        split[kind.name] = {part.name: part.read_bytes() for part in folder.iterdir()}
    wide = split["BF16"]
    assert len(wide) > 1
    speeds = set()
    for others in ({"tale-Q4_0.gguf": ggufs["tale-Q4_0.gguf"]}, split["Q8_0"]):
        hub.repos["org/gguf"] = {**others, **wide}
        found = apart("plan", "org/gguf", "--json", "--cache", cache, env=environment)
        assert found.code == 0, found.err
        each = {each["quantisation"]: each for each in found.report["files"]}
        assert len(each) == 2 and all(one["why"] is None for one in each.values()), each
        speeds.add(each["BF16"]["predicted"]["decode_tokens_per_s"])
    alone = apart("plan", "org/gguf:BF16", "--json", "--cache", cache, env=environment)
    assert speeds == {alone.report["predicted"]["decode_tokens_per_s"]}


def test_a_format_that_is_refused_is_not_downloaded(
    hub: FakeHub, environment: dict[str, str], ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    from tests.cpu.commands import apart, machine_cache, refused

    hub.repos["org/gguf"] = ggufs
    flags = ("--weights", "int8", "--json", "--cache", machine_cache(tmp_path / "cache"))
    found = apart("run", "org/gguf:Q8_0", "hello", *flags, env=environment)
    refused(found, "org/gguf/tale-Q8_0.gguf is quantised (q8_0)")
    assert not list((tmp_path / "hub").rglob("*.gguf"))


def gguf_header(nbytes: int) -> bytes:
    """A GGUF file whose header has a list of so many bytes."""
    ahead = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"x"
    return ahead + struct.pack("<IIQ", 9, 0, nbytes) + bytes(nbytes)


def test_headers_are_bounded_together(hub: FakeHub, where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.hubs import headers

    hub.repos["org/parts"] = {f"m-{i:05}-of-00003.gguf": gguf_header(5_000_000) + bytes([i]) for i in (1, 2, 3)}
    with (
        pytest.raises(PenstockError, match=r"^org/parts/m-00002-of-00003\.gguf has a header that"),
        to_plan("org/parts", where),
    ):
        pass
    monkeypatch.setattr(headers, "_MAX_READ_BYTES", 3_000_000)
    with (
        pytest.raises(BrokenModel, match=r"^org/parts has headers of more than 2\.86 MiB"),
        to_plan("org/parts", where),
    ):
        pass


def test_ctrl_c_while_headers_are_read(hub: FakeHub, environment: dict[str, str]) -> None:
    """Servers that send nothing are not waited for, where a read alone would wait for 50 minutes."""
    import signal
    import subprocess
    import sys

    over, begun = threading.Event(), threading.Event()
    said = {**CONFIG, "quantization_config": {"quant_method": "fp8"}}
    hub.repos["org/name"]["config.json"] = json.dumps(said).encode()
    hub.faults.append(Fault("/stored/", lambda _: (begun.set(), over.wait(3000))[0], 1000))
    patient = "import sys; from penstock.hubs import web; web._TIMEOUT_S = web._WHOLE_ANSWER_S = 3000.0; "
    command = [
        sys.executable,
        "-c",
        f"{patient}from penstock.cli.entry import main; sys.exit(main())",
        "plan",
        "org/name",
    ]
    how = {"env": environment, "stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
    child = subprocess.Popen(
        command, **how, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )  # type: ignore[call-overload]
    try:
        assert begun.wait(600)
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=600)
        assert child.returncode == 130 and b"Traceback" not in told, told
    finally:
        over.set()
        child.kill()
        child.wait()


def test_a_gguf_header_that_is_hostile(hub: FakeHub, where: Where, ggufs: dict[str, bytes]) -> None:
    whole = ggufs["tale-Q4_0.gguf"]
    rng = np.random.default_rng(5)
    for nth in range(40):
        content = bytearray(whole[: 1 << 19])
        content[int(rng.integers(4, 400))] ^= int(rng.integers(1, 256))
        hub.repos["org/gguf"] = {"a.gguf": bytes(content) if nth else b"GGUF" + b"\xff" * 20_000}
        try:
            with to_plan("org/gguf", where) as path:
                describe(path, to_plan=True)
        except PenstockError as error:
            assert "\n" not in error.message and "penstock-" not in error.message


# --- commands ------------------------------------------------------------------------------------------------------


def test_commands_take_names_of_the_hub(
    hub: FakeHub, environment: dict[str, str], tmp_path: Path, files: dict[str, bytes]
) -> None:
    from tests.cpu.commands import apart, machine_cache, refused

    flags = ("--cache", machine_cache(tmp_path / "cache"), "--json")
    planned = apart("plan", "org/name", *flags, env=environment)
    assert planned.code == 0, planned.err
    assert "penstock: org/name is not here: " in planned.err and " would be downloaded (read of it" in planned.err
    assert planned.report["predicted"]["decode_tokens_per_s"] > 0
    config = files["config.json"]
    hub.repos["org/name"]["config.json"] = config.replace(b'"llama"', b'"mamba"')
    refused(apart("pull", "org/name", "--json", env=environment), "mamba", "UnsupportedModel")
    hub.repos["org/name"]["config.json"] = config
    pulled = apart("pull", "org/name", "--json", env=environment)
    assert pulled.code == 0 and pulled.report["downloaded_bytes"] == sum(map(len, files.values())), pulled.err
    again = apart("pull", "hf.co/org/name", env=environment)
    assert again.code == 0 and "all of it was here" in again.err and again.out == ""
    run = apart("run", "org/name", "hi", "--max-tokens", 2, *flags, env=environment)
    assert run.code == 0 and run.report["output_tokens"] == 2, run.err
    assert next((tmp_path / "cache/models").iterdir()).name.startswith("name-")
    refused(apart("pull", "org/none", "--json", env=environment), "the Hub has no such model", "BadRequest")
    (tmp_path / "org/name").mkdir(parents=True)
    here = apart("pull", str(tmp_path), "--json", env=environment)
    refused(here, "is no name on the Hub", "BadRequest")


def test_a_run_that_downloads_keeps_its_limit(hub: FakeHub, environment: dict[str, str], tmp_path: Path) -> None:
    """With the least memory that it says it needs."""
    from tests.cpu.commands import ROOT, apart, machine_cache

    tale = ROOT / "penstock/assets/tale-llama"
    hub.repos["org/tale"] = {file.name: file.read_bytes() for file in tale.iterdir()}
    flags = ("--max-tokens", 8, "--cache", machine_cache(tmp_path / "cache"), "--json")
    told = apart("run", "org/tale", "Once", *flags, "--host-memory", "1MiB", env=environment)
    least = told.report["error"]["minimum_bytes"]
    (tmp_path / "home/hf").rename(tmp_path / "home/before")
    run = apart("run", "org/tale", "Once", *flags, "--host-memory", least, env=environment)
    assert run.code == 0 and "downloads " in run.err and run.report["peak_host_bytes"] <= least, run.err
    again = apart("run", "org/tale", "Once", *flags, "--host-memory", least - (14 << 20), env=environment)
    assert again.code == 0 and again.report["peak_host_bytes"] <= least - (14 << 20), again.err


def test_what_cannot_run_is_not_downloaded(hub: FakeHub, where: Where, tmp_path: Path) -> None:
    from penstock.serve.source import resolve

    quantised = {**CONFIG, "quantization_config": {"quant_method": "strange"}}
    hub.repos["org/quantised"] = {**hub.repos["org/name"], "config.json": json.dumps(quantised).encode()}
    hub.repos["org/type"] = {**hub.repos["org/name"], "config.json": b'{"model_type": "strange", "dtype": "float32"}'}
    hub.repos["org/gguf"] = {"a-IQ2_M.gguf": b"GGUF" + bytes(90_000), "a-Q4_0.gguf": b"GGUF" + bytes(90_001)}
    for model, says in {
        "org/quantised": r"^org/quantised.*strange",
        "org/type": r"^org/type/config\.json.*strange",
        "org/gguf:IQ2_M": r"^org/gguf:IQ2_M: penstock does not read this format; org/gguf has IQ2_M .*not read",
        "org/gguf:Q4_0": r"^org/gguf/a-Q4_0\.gguf",
    }.items():
        with pytest.raises(PenstockError, match=says):
            resolve(model, weights=None, cache=tmp_path / "cache", where=where)
        assert where.hub_cache is not None and not list(where.hub_cache.rglob("blobs/*"))
    assert resolve("org/name", weights=None, cache=tmp_path / "cache", where=where).folder.name.startswith("name-")


def test_a_folder_here_comes_before_the_hub(
    hub: FakeHub, where: Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.serve.named import named_on_the_hub

    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("org/name", where).path == Path("org/name") and not hub.seen
    with pytest.raises(BadRequest, match=r"org/name is here, a path: hf\.co/org/name names the Hub's"):
        named_on_the_hub("org/name")
    (tmp_path / "hf.co/org/name").mkdir(parents=True)
    assert locate("hf.co/org/name", where).path != Path("org/name") and hub.seen


def test_nothing_but_names_of_the_hub_loads_its_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys, penstock, penstock.cli.main, penstock.serve.source, penstock.serve.planning, penstock.serve.llm;"
        "from penstock.serve.named import locate; from penstock.hubs.where import Where; locate('.', Where());"
        "print([m for m in ('huggingface_hub', 'httpx2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_plan_by_headers_imports_no_numpy(hub: FakeHub, environment: dict[str, str]) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from penstock.serve.planning import describe; from penstock.serve.named import to_plan;"
        "from penstock.hubs.where import Where; path = to_plan('org/name', Where()); describe(path.__enter__());"
        "print([m for m in ('numpy', 'torch') if m in sys.modules]); path.__exit__(None, None, None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_digests() -> None:
    assert git_digest(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"  # git's empty blob
