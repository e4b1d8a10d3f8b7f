"""`tests.at_size` itself: its cases are models that there are, and it sees what differs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import StorageFailed
from penstock.runtime.kv_pages import KvPages
from penstock.serve.engine import Engine
from penstock.serve.pages import IdsOf, Pages, Table
from penstock.serve.session import Session
from penstock.serve.told import Failed, Told
from penstock.store.packed import read_config
from tests.at_size import __main__ as at_size
from tests.at_size import beside_device, served
from tests.at_size.draws import CONTEXT, Case, draw, narrowed, schedule
from tests.at_size.requests import Request


@pytest.fixture
def small() -> Case:
    config = narrowed(draw(2)).config | {"num_hidden_layers": 1}
    case = replace(draw(2), config=config, weights="int4", kv=None, isa="portable", exact=False, batch=3)
    return replace(case, share=1.0, chunk_rows=64, kv_home=None, kv_tokens=None, objective="latency")


@pytest.mark.parametrize("kv_tokens", [None, CONTEXT])
def test_rows_are_the_same_alone(
    small: Case, kv_tokens: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_size, "ROWS", 200)
    assert not at_size.differences(replace(small, kv_tokens=kv_tokens), tmp_path)


def test_a_row_that_differs_is_told(small: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Session.step

    def wrong(session: Session, p: object, tokens: list[np.ndarray]) -> list[np.ndarray]:
        (logits,) = step(session, p, tokens)  # type: ignore[arg-type]
        return [logits * np.float32(1 + 1e-3 * (sum(map(len, tokens)) > 1))]

    monkeypatch.setattr(at_size, "ROWS", 200)
    monkeypatch.setattr(Session, "step", wrong)
    assert at_size.differences(small, tmp_path)


@pytest.mark.parametrize("number", [2, 10])
def test_answers_of_a_service_are_the_same_alone(small: Case, number: int, tmp_path: Path) -> None:
    assert not served.differences(replace(small, number=number, share=0.5), tmp_path)


def test_a_lost_page_is_told(small: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, lost = Pages.end, list[int]()

    def losing(pages: Pages, table: Table, ids: IdsOf) -> None:
        if not lost:
            lost.append(table.pages.pop())
        end(pages, table, ids)

    monkeypatch.setattr(Pages, "end", losing)
    assert any("pages" in line for line in served.differences(replace(small, number=53), tmp_path))


def test_a_copy_that_did_not_happen_is_told(small: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KvPages, "copy", lambda *_: None)
    assert served.differences(replace(small, number=53), tmp_path)


@pytest.mark.parametrize("number", [94, 182])
def test_plans_beside_a_device_are_the_same_however_they_run(number: int, tmp_path: Path) -> None:
    assert not beside_device.differences(narrowed(draw(number)), tmp_path)


def test_a_row_that_differs_beside_a_device_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Session.step

    def wrong(session: Session, p: object, tokens: list[np.ndarray]) -> list[np.ndarray]:
        logits = step(session, p, tokens)  # type: ignore[arg-type]
        return [each * np.float32(1 + 1e-3 * session._how.serial) for each in logits]

    monkeypatch.setattr(Session, "step", wrong)
    (told,) = beside_device.differences(narrowed(draw(94)), tmp_path)
    assert "one task after the other" in told


def test_reads_that_fail_are_told_as_such(small: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draws, failed, judged = served.setting, list[Failed](), served._judged

    def failing(rng: random.Random, case: Case) -> served.Setting:
        return replace(draws(rng, case), faults=0.3)

    def counting(alone: Engine, one: Request, told: Sequence[Told], *more: Any) -> Iterator[str]:
        failed.extend(each for each in told if isinstance(each, Failed))
        yield from judged(alone, one, told, *more)

    monkeypatch.setattr(served, "setting", failing)
    monkeypatch.setattr(served, "_judged", counting)
    assert not served.differences(replace(small, number=53, share=0.1), tmp_path)
    assert any(isinstance(each.error, StorageFailed) for each in failed)


def test_cases_are_models(tmp_path: Path) -> None:
    for number in range(40):
        config = tmp_path / "config.json"
        config.write_text(json.dumps(draw(number).config))
        read_config(config)


def test_a_schedule_reads_each_sequence_in_order() -> None:
    reached = [0] * 5
    for rows in schedule(random.Random(3), 5, 64, 1000):
        assert sum(each.rows for each in rows) <= 64 and all(each.rows > 0 for each in rows)
        for each in rows:
            assert each.start == reached[each.seq]
            reached[each.seq] += each.rows
    assert max(reached) <= CONTEXT
