"""Who may import whom (docs/ARCHITECTURE.md). Imports inside functions count too."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.syntax import tree_of

ROOT = Path(__file__).parents[2] / "penstock"
EVERYWHERE = {"errors", "elsewhere", "units", "__init__"}
MAY_IMPORT = {
    "spec": set(),
    "models": {"spec"},
    "graph": {"spec"},
    "planner": {"graph", "spec"},
    "store": {"models", "spec", "_native"},
    "hubs": {"models", "spec", "store"},
    "kernels": {"graph", "spec", "_native"},
    "runtime": {"graph", "spec", "kernels", "store", "_native"},
    "serve": {"planner", "runtime", "hubs", "store", "graph", "models", "spec"},
    "cli": {"planner", "runtime", "hubs", "store", "graph", "models", "spec", "serve", "kernels"},
}
STANDARD_LIBRARY_ONLY = ("spec", "models", "graph", "planner")
HIGHS_ALLOWED = ("planner/programs/highs.py",)  # the linear and integer programs; imported when it is asked
TORCH_ALLOWED = ("kernels/gpu", "runtime/device/cuda")
# Who may read what a byte, a flop or a call costs: the cost formula, what measures, what shows measurements.
RATES = {"alpha_s", "s_per_byte", "s_per_flop"}
RATES_ALLOWED = (
    "planner/cost.py", "spec/machine.py", "runtime/probe", "runtime/fit.py", "runtime/device/cuda/probe.py",
    "serve/history.py", "cli/probe.py",
)  # fmt: skip
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Full names of the modules that a file imports, relative imports resolved."""
    found: set[str] = set()
    package = ["penstock", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names} | ({module} - {"penstock"})
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    relative = path.relative_to(ROOT)
    folder = relative.parts[0] if len(relative.parts) > 1 else ""
    for name in imports(path):
        top, *rest = name.split(".")
        if top in ("torch", "triton"):
            assert str(relative).startswith(TORCH_ALLOWED), f"{relative} imports {top}"
        if top == "highspy":
            assert str(relative).startswith(HIGHS_ALLOWED), f"{relative} imports {top}"
            continue
        if top != "penstock":
            if folder in STANDARD_LIBRARY_ONLY:
                assert top in sys.stdlib_module_names, f"{relative} imports {name}: {folder} is standard library only"
            continue
        layer = rest[0] if rest else "__init__"
        if folder and layer not in EVERYWHERE and layer != folder:
            assert layer in MAY_IMPORT[folder], f"{relative} imports {name}: {folder} may import {MAY_IMPORT[folder]}"


def modules_of(found: set[str], modules: set[str]) -> set[str]:
    """Of imported names those that are modules. `from package import module` needs the module, not the package."""
    packages = {name.rpartition(".")[0] for name in found & modules}
    beyond = {name.rpartition(".")[0] for name in found - modules}
    return {name for name in found & modules if name not in packages or name in beyond}


def test_imports_go_in_no_circle() -> None:
    """Those under TYPE_CHECKING and inside functions too. `penstock` itself names what others import lazily."""
    whole = {path: path.relative_to(ROOT.parent).with_suffix("").parts for path in FILES}
    names = {path: ".".join(parts).removesuffix(".__init__") for path, parts in whole.items()}
    modules = set(names.values())
    left = {names[path]: modules_of(imports(path), modules) - {names[path], "penstock"} for path in FILES}
    while leaves := [name for name, wanted in left.items() if not wanted & left.keys()]:
        for name in leaves:
            del left[name]
    assert not left


def test_every_folder_has_a_rule() -> None:
    folders = {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()}
    assert folders <= set(MAY_IMPORT), folders - set(MAY_IMPORT)


def test_no_environment_outside_cli() -> None:
    for path in FILES:
        if path.relative_to(ROOT).parts[0] != "cli":
            text = path.read_text()
            assert "os.environ" not in text and "getenv" not in text, f"{path} reads the environment"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_only_the_cost_formula_turns_bytes_into_seconds(path: Path) -> None:
    relative = str(path.relative_to(ROOT))
    if not relative.startswith(RATES_ALLOWED):
        read = {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
        assert not read & RATES, f"{relative} reads {sorted(read & RATES)}: ask planner/cost.py"
    # A speed is told, or compared with another one; in the planner nobody else counts with it.
    for node in ast.walk(tree_of(path)) if relative.startswith("planner/") else ():
        if isinstance(node, ast.BinOp) and relative != "planner/cost.py":
            parts = {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
            assert not any("bytes_per_s" in part for part in parts), f"{relative}:{node.lineno} counts with a speed"


# What opens files by itself: others' files are read, and ours written, by store/files.py.
OPENS = {
    "store/files.py",
    "store/direct.py",  # shards, past the page cache
    "store/locks.py",  # folders
    "hubs/transfer.py",  # a download that goes on where it stopped
    "runtime/kv_file.py",  # a file without a name
    "runtime/host.py",  # the kernel's
    "runtime/this_machine.py",  # the kernel's
    "serve/confined_child.py",  # the kernel's
    "cli/main.py",  # /dev/null
    "cli/docs.py",  # for who develops penstock
}


def test_files_are_opened_in_one_place() -> None:
    """A pipe would be waited for, a device never end, a name lead elsewhere."""
    opening = {"read_text", "read_bytes", "write_text", "write_bytes"}
    for path in FILES:
        if str(path.relative_to(ROOT)) in OPENS:
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                method = isinstance(node.func, ast.Attribute) and name.rpartition(".")[2] in opening
                assert not method and name not in ("open", "os.open", "io.open"), f"{path}: {ast.unparse(node)}"


def test_the_papers_mathematics_knows_no_plans() -> None:
    """`planner/programs` has numbers in and out. It may know the sizes of a model, but neither plans nor tasks."""
    may = ("penstock.planner.programs", "penstock.spec.places", "penstock.spec.model", "penstock.spec.format")
    for path in FILES:
        if path.relative_to(ROOT).parts[:2] == ("planner", "programs"):
            ours = {name for name in imports(path) if name.startswith("penstock.")}
            assert all(name.startswith((*may, "penstock.errors", "penstock.units")) for name in ours), (
                f"{path} imports {ours}"
            )
