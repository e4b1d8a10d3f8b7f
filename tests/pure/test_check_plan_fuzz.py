"""Plans from outside with random changes: none does worse than a clear error."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PenstockError
from penstock.graph.check_plan import check_plan
from penstock.spec import plan as plans
from tests.pure.checked_plans import F32, FIRING, NEURONS, TIED, asking, predicting, rebuilt, runs, streaming

Json = Any
Path = tuple[Any, ...]


BASES = [(streaming(TIED), TIED, F32), (predicting(), FIRING, F32), (asking(), FIRING, NEURONS)]
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([4096, 2**21, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e300, float("nan"), float("inf")])
    | st.sampled_from(["", "host", "disk0", "gpu0", "0.ffn", "embed", "float16", "int4", "\ud800", "a\nb", [], {}])
)  # fmt: skip


def paths(tree: Json, at: Path = ()) -> list[Path]:
    """Where every value below a JSON tree stands."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path for key, value in inside for path in [(*at, key), *paths(value, (*at, key))]]


# Most values of a plan are those of its units, and most others the model's: pick the field's kind first.
def kinds_of(tree: Json) -> dict[Path, list[Path]]:
    found: dict[Path, list[Path]] = {}
    for path in paths(tree):
        found.setdefault(tuple("*" if isinstance(key, int) else key for key in path), []).append(path)
    return found


VALID = [json.loads(plans.dumps(plan)) for plan, _, _ in BASES]
KINDS = [kinds_of(tree) for tree in VALID]


def mutate(data: st.DataObject, tree: Json, kinds: dict[Path, list[Path]]) -> None:
    """One change somewhere: another value, a missing, doubled or swapped entry, or a name that is unknown."""
    kind = data.draw(st.sampled_from(sorted(kinds)))
    path = data.draw(st.sampled_from(kinds[kind]))
    for key in path[:-1]:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return  # an earlier change took it away
    if not (isinstance(tree, dict) or (isinstance(tree, list) and path[-1] in range(len(tree)))):
        return  # or made something else of it
    how = data.draw(st.sampled_from(["value", "value", "delete", "double", "swap", "add"]))
    if how == "value":
        tree[path[-1]] = data.draw(VALUES)
    elif how == "delete":
        tree.pop(path[-1], None) if isinstance(tree, dict) else tree.pop(path[-1])
    elif isinstance(tree, list) and how == "double":
        tree.insert(path[-1], copy.deepcopy(tree[path[-1]]))
    elif isinstance(tree, list) and how == "swap":
        other = data.draw(st.integers(0, len(tree) - 1))
        tree[path[-1]], tree[other] = tree[other], tree[path[-1]]
    elif isinstance(tree, dict) and how == "add":
        tree[data.draw(st.sampled_from(["", "x", "gpu0", "a\nb"]))] = data.draw(VALUES)


@pytest.mark.fuzz
@given(st.data())
def test_fuzz_no_plan_does_worse_than_a_clear_error(data: st.DataObject) -> None:
    base = data.draw(st.integers(0, len(BASES) - 1))
    (_, spec, weights), tree = BASES[base], copy.deepcopy(VALID[base])
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data, tree, KINDS[base])
    try:
        plan = plans.loads(json.dumps(tree), "plan.json")
        check_plan(plan, spec, weights)
    except PenstockError as error:
        assert error.exit_code == 2
        return
    runs(plan)


@pytest.mark.fuzz
@given(st.data())
def test_fuzz_a_plan_that_fits_its_own_arenas(data: st.DataObject) -> None:
    """As above, where the arenas are made to agree, so that more gets past them."""
    base = data.draw(st.integers(0, len(BASES) - 1))
    (_, spec, weights), tree = BASES[base], copy.deepcopy(VALID[base])
    mutate(data, tree, KINDS[base])
    try:
        plan = plans.loads(json.dumps(tree), "plan.json")
        check_plan(plan, spec, weights)
    except PenstockError as error:
        if "is not what the rest" not in error.message:
            return
        plan = rebuilt(plan)
        check_plan(plan, spec, weights)
    runs(plan)
