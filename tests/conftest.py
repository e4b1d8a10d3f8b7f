"""What all tests share: how hard Hypothesis searches, and which build of the extension is under test."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.cpu.placements import Logits, Models

# Started in the background by a shell we ignore Ctrl-C, and our children would too; some tests send it to them.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline in either: the two cores of a CI machine are shared, and an example that takes 10 ms can take 300.
# Nor is it told by the clock whether drawing an example takes too long.
UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ci", max_examples=100, derandomize=True, **UNTIMED)
settings.register_profile("fuzz", max_examples=3000, **UNTIMED)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tests marked `thinned(n)` one case of n runs, those first that have values which no other has had. All run
    under the profile `fuzz`, and where a case is named on the command line."""
    if PROFILE == "fuzz" or any("[" in arg for arg in config.args):
        return
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thinned") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for name, some in cases.items():
        mark = some[0].get_closest_marker("thinned")
        assert mark is not None
        random.Random(str(name)).shuffle(some)  # a step through a grid would leave whole columns out
        seen: set[tuple[str, int]] = set()
        for _ in range(-(-len(some) // mark.args[0])):
            values = [set(getattr(item, "callspec").indices.items()) for item in some]  # noqa: B009
            best = max(range(len(some)), key=lambda i: len(values[i] - seen))
            seen |= values[best]
            del some[best]
        left_out |= set(some)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


# `make fuzz` runs the native tests against a build with sanitizers, which is not the installed one.
if path := os.environ.get("PENSTOCK_NATIVE"):
    spec = importlib.util.spec_from_file_location("penstock._native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["penstock._native"] = module


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny models of every family."""
    from tests.cpu.placements import made

    return made(tmp_path_factory.mktemp("synth"))


@pytest.fixture(scope="module")
def oracle(models: Models) -> Logits:
    """All in memory, one task after the other."""
    from tests.cpu.placements import serially

    return serially(models)


@pytest.fixture(scope="module")
def exact(models: Models) -> Logits:
    """As `oracle`, with float32 activations, as torch multiplies."""
    from tests.cpu.placements import serially

    return serially(models, exact=True)
