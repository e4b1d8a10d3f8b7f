"""The command line: exit codes, one-line errors, the JSON line, and what `--help` imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from penstock.cli import docs, main, options, output
from penstock.cli.conversions import plain_number
from penstock.errors import BadRequest, DoesNotFit, InternalError

ROOT = Path(__file__).parents[2]
STORIES = ROOT.parent / "shared/models/stories-260k"
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="the model stories-260k is not on this machine")


def test_the_package_is_the_command_line():
    for name in ("penstock", "penstock.cli"):
        done = subprocess.run([sys.executable, "-m", name, "--version"], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("penstock ")


def penstock(*args: str, stdin: str = "", **kwargs) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "penstock.cli", *args]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=600, **kwargs)


@pytest.fixture
def in_process(monkeypatch, capsys):
    """Runs a command whose body is `body()`; gives exit code, stdout, stderr."""

    def call(body, *args):
        monkeypatch.setattr(main, "_invoke", lambda _: body() or 0)
        code = main.main(args)
        return code, *capsys.readouterr()

    return call


def raises(error):
    def body():
        raise error

    return body


# --- start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["--version"]])
def test_help_imports_nothing_heavy(args):
    code = (
        "import sys; from penstock.cli.main import main; code = main(sys.argv[1:]); "
        "print([m for m in ('torch', 'numpy', 'rich', 'jinja2', 'tokenizers', 'asyncio') if m in sys.modules]); "
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"


def test_planning_imports_neither_torch_nor_numpy():
    code = (
        "import sys; import penstock.cli.plan, penstock.serve.planning; "
        "print('numpy' in sys.modules or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("args", "exits", "without"),
    [
        # Texts, flags and defaults are let through.
        (
            "plan llama-3.2-1b --weights int4 --machine pc-32gb-nvme --compare",
            0,
            "pydantic penstock.cli.run torch numpy",
        ),
        # Plain numbers without bounds are converted here.
        ("run no-such-model Hi --max-tokens 1 --temperature 0 --top-p 0.5", 2, "pydantic"),
    ],
)
def test_a_command_imports_no_pydantic(args, exits, without):
    """Typer converts with it, which takes 70 ms."""
    code = (
        "import sys; from penstock.cli.main import main; "
        f"code = main({args.split()}); print(code, [m for m in {without.split()} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == f"{exits} []", done.stderr


@pytest.mark.parametrize(
    "text", ["7", "-1", "0", "1.5", "-0.25", "007", "1e3", "1_000", "+1", "1.0", "9" * 16, "x", "", "∞"]
)
@pytest.mark.parametrize("kinds", [(int, type(None)), (float, type(None))])
def test_a_number_that_is_converted_here_is_what_pydantic_makes_of_it(text, kinds):
    made = plain_number(text, kinds)
    if not isinstance(made, str):
        expected = TypeAdapter(kinds[0]).validate_python(text)
        assert (type(made), made) == (type(expected), expected)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--context", "x"], "'--context'"), (["--context", "0"], "'--context'"), (["--weights"], "--weights"),
        (["--context", "512", "--batch", "2", "--no-verify"], ""),
    ],
)  # fmt: skip
def test_what_is_not_let_through_is_converted(args, says, capsys):
    code = main.main(["plan", "llama-3.2-1b", "--machine", "pc-32gb-nvme", *args])
    said = capsys.readouterr()
    assert code == (2 if says else 0) and says in said.err
    assert says or "context 512 tokens × 2 sequences" in said.out


def test_help_names_every_command():
    done = penstock()
    assert done.returncode == 0
    for name in ("demo", "run", "plan", "pack", "synth", "eval", "probe", "list", "rm", "prune"):
        assert f"  {name} " in done.stdout


def test_docs_are_fresh(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert (ROOT / docs.FILE).read_text(encoding="utf-8") == docs.page()


def test_docs_check(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert docs.main(["--check"]) == 1
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    assert docs.main(["--chekc"]) == 2
    assert "stale" in capsys.readouterr().err


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["fly"], "No such command 'fly'"),
        (["run"], "Missing argument 'MODEL'"),
        (["run", "m", "--foo"], "No such option: --foo"),
        (["run", "m", "hi", "--batch", "two"], "'--batch'"),
        (["run", "m", "hi", "--threads", "0"], "'--threads'"),
        (["run", "m", "hi", "--device", "tpu"], "one of auto, cuda, none, emulated"),
        (["run", "m", "hi", "--host-memory", "3q"], "--host-memory '3q' is not a size"),
        (["run", "m", "hi", "--objective", "fun"], "latency or throughput"),
        (["run", "m", "hi", "--temperature", "-1"], "temperature is -1"),
        (["run", "m", "hi", "--plan", "/no/such/file"], "/no/such/file"),
        (["run", "/no/such/model", "hi"], "/no/such/model"),
        (["eval", "m", "/no/such/file"], "/no/such/file"),
        (["pack", "src"], "SRC and DST"),
        (["pack", "--verify", "src", "--weights", "int4"], "name DST"),
        (["synth", "/no/such/config", "dst"], "/no/such/config"),
    ],
)
def test_users_mistakes_are_one_line_and_2(args, says, capsys):
    assert main.main([*args, "--json"]) == 2
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert lines[0].startswith("penstock: ") and says in lines[0]
    assert lines[1:] in ([], ["Try `penstock --help`."], [f"Try `penstock {args[0]} --help`."])
    error = json.loads(out.splitlines()[-1])["error"]
    assert error["type"] == "BadRequest" and says in error["message"]


def test_without_json_stdout_stays_empty(capsys):
    assert main.main(["run", "m", "--foo"]) == 2
    assert capsys.readouterr().out == ""
    # Behind `--` it is text, not a flag.
    assert main.main(["run", "/no/such/model", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_what_does_not_fit_carries_its_numbers(in_process):
    error = DoesNotFit("too big", tier="host", need_bytes=3, have_bytes=1, minimum_bytes=2)
    code, out, err = in_process(raises(error), "--json")
    assert (code, err) == (2, "penstock: too big\n")
    expected = {"type": "DoesNotFit", "message": "too big", "tier": "host"}
    assert json.loads(out) == {"error": {**expected, "need_bytes": 3, "have_bytes": 1, "minimum_bytes": 2}}


@pytest.mark.parametrize("error", [ZeroDivisionError("a\nb"), InternalError("a b"), OSError("a b"), RuntimeError()])
def test_our_faults_are_1(in_process, error, monkeypatch):
    monkeypatch.delenv("PENSTOCK_DEBUG", raising=False)
    code, out, err = in_process(raises(error), "--json")
    assert code == 1
    assert "a fault of ours" in err and err.count("\n") == 1
    assert json.loads(out)["error"]["type"] == "InternalError"
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    _, _, err = in_process(raises(error))
    assert "Traceback" in err and "in body" in err


def test_files_and_disks_are_the_users(in_process):
    code, out, err = in_process(raises(PermissionError(13, "Permission denied", "/x/y")), "--json")
    assert (code, err) == (2, "penstock: /x/y: Permission denied\n")
    assert json.loads(out)["error"] == {"type": "StorageFailed", "message": "/x/y: Permission denied"}
    assert in_process(raises(OSError(28, "No space left on device")))[0] == 2


def test_ctrl_c_is_130(in_process):
    assert in_process(raises(KeyboardInterrupt()))[0] == 130


def test_reader_that_has_seen_enough():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "penstock.cli", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, timeout=600)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_disk_behind_stdout():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "penstock.cli", "--help"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=600)
    assert done.returncode == 2
    assert done.stderr.startswith("penstock: ") and done.stderr.count("\n") == 1


# --- options ---------------------------------------------------------------------------------------------------


def test_flags_become_an_ask():
    machine = options.Machine(host_memory="1GiB", resident="10MiB", device_memory="2g")
    ask = options.Workload(batch=3, context=99, objective="throughput", kv="float16").ask(machine, prompt_tokens=5)
    assert (ask.host_memory_bytes, ask.resident_bytes, ask.device_memory_bytes) == (2**30, 10 * 2**20, 2**31)
    assert (ask.batch, ask.context, ask.objective, ask.kv, ask.prompt_tokens) == (3, 99, "throughput", "float16", 5)
    assert options.Workload(prompt_tokens=7).ask(machine, prompt_tokens=5).prompt_tokens == 7


def test_longest_answer():
    assert options.Sampling().params({}).max_tokens == options.DEFAULT_MAX_TOKENS
    assert options.Sampling().params({}, options.Workload(output_tokens=9)).max_tokens == 9
    assert options.Sampling(max_tokens=3).params({}, options.Workload(output_tokens=9)).max_tokens == 3
    params = options.Sampling(stop=["a", "b"], seed=0, temperature=0.0).params({"do_sample": True})
    assert (params.stop, params.seed, params.greedy) == (("a", "b"), 0, True)


def test_numpy_is_quiet(monkeypatch):
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    options.quiet_blas()
    assert os.environ["OPENBLAS_NUM_THREADS"] == os.environ["MKL_NUM_THREADS"] == "1"


def test_text_files(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(BadRequest, match="UTF-8"):
        options.read_text(str(tmp_path / "latin"))
    with pytest.raises(BadRequest, match="cannot be read"):
        options.read_text(str(tmp_path))
    (tmp_path / "plan").write_text('{"plan": 5}')
    with pytest.raises(BadRequest, match="schema"):
        options.given_plan(str(tmp_path / "plan"), options.Machine(), options.Workload())


# --- output ----------------------------------------------------------------------------------------------------


def test_json_has_no_nan(capsys):
    output.print_json({"a": [float("nan"), (1.5, float("inf"))], "é": {3: None}})
    out = capsys.readouterr().out
    assert out.isascii() and json.loads(out) == {"a": [None, [1.5, None]], "é": {"3": None}}


def test_progress_lines(capsys, monkeypatch):
    assert output.progress_line("packing 3.ffn", 2**30, 2**32, 2e9) == (
        "packing 3.ffn: 1.00 GiB of 4.00 GiB, 2.00 GB/s, 2 s left"
    )
    assert output.progress_line("scoring tokens", 10, 20, 0.0) == "scoring tokens: 10 of 20, 0.0 a second"
    clock = iter([0.0, 0.1, 0.7, 0.8, 6.0])
    monkeypatch.setattr(output.time, "perf_counter", lambda: next(clock))
    with output.progress() as tell:
        for done in (0, 10, 70, 80, 600):
            tell("loading", done * 10**6, 10**9)
        tell("measuring", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "loading: 66.8 MiB of 954 MiB",
        "loading: 572 MiB of 954 MiB",
        "penstock: measuring",
    ]
    assert "0.10 GB/s" in lines[0]
