"""Several answers to one prompt: those of each alone, by the passes that are predicted, with the figures of these."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BadRequest, StorageFailed
from penstock.graph.tasks import Pass
from penstock.runtime.probe import machine_file
from penstock.serve.engine import Engine
from penstock.serve.history import runs
from penstock.serve.sampling import SamplingParams
from penstock.serve.together import Together
from penstock.spec.plan import Plan
from penstock.store.packed import open_packed
from tests.cpu.commands import MACHINE, Call, here, machine_cache
from tests.cpu.engines import load, make_model, streaming
from tests.cpu.services import CONTEXT, SEQS
from tests.cpu.services import plans as service_plans

SHORT, LONG = [5, 6, 7, 8, 9], np.random.default_rng(3).integers(0, 200, 80).tolist()
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)
NAMES = ["resident", "streaming", "two batches", "few pages", "KV on disk", "flexgen"]


def plans(folder: Path) -> dict[str, Plan]:
    sizes = {"batch_seqs": SEQS // 2, "batches_per_pass": 2, "chunk_rows": 16, "logits_rows": 16, "context": CONTEXT}
    blocks = streaming(open_packed(folder), **sizes, kv_spilled=frozenset({0}), order="flexgen")  # type: ignore[arg-type]
    return service_plans(folder) | {"flexgen": blocks}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "llama", "int4")


class Passes(list[Pass]):
    """The passes of an engine."""

    def __init__(self, engine: Engine) -> None:
        engine.session.watchers.append(lambda _, p: self.append(p) if p is not None else None)

    @property
    def rows(self) -> int:
        return sum(batch.total_rows for p in self for batch in p.batches)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("count", [SEQS, 7])
def test_answers_are_those_of_one_by_one(folder: Path, name: str, prompt: list[int], count: int) -> None:
    varied = replace(GREEDY, temperature=0.8, seed=3)
    with load(folder, plan=plans(folder)[name]) as engine:
        expected = [[engine.generate([prompt], params.nth(i))[0] for i in range(count)] for params in (GREEDY, varied)]
        assert len({tuple(answer.token_ids) for answer in expected[1]}) > 1
        passes = Passes(engine)
        for params, alone in zip((GREEDY, varied), expected, strict=True):
            passes.clear()
            together = Together(engine, prompt, params, count)
            answers = together.answers()
            assert [a.token_ids for a in answers] == [a.token_ids for a in alone]
            assert [(a.text, a.finish_reason) for a in answers] == [(a.text, a.finish_reason) for a in alone]
            assert list(passes[: len(together.reads)]) == together.reads or count > together.batch
            assert passes[-1].then is None
            # What is found is not read: all positions but those of the last tokens go through the model, each once.
            found = sum(a.cached_tokens for a in answers)
            assert passes.rows == count * (len(prompt) + GREEDY.max_tokens - 1) - found or name == "few pages"
            assert (found > 0) == (prompt is LONG) or count > together.batch
            first = answers[0]
            assert first.batch == together.batch == (min(count, SEQS) if name != "few pages" else first.batch)
            alone_decode = [p for p in passes if p.purpose == "decode"]
            assert first.decode_steps == len(alone_decode)
            assert first.decode_tokens == sum(batch.total_rows for p in alone_decode for batch in p.batches)
            assert 0 < first.batch_ttft_s <= max(a.ttft_s for a in answers) and first.decode_s > 0
            assert (first.decode_disk_bytes > 0) == (name in ("streaming", "two batches", "KV on disk", "flexgen"))
        assert engine.generate([prompt], GREEDY)[0].token_ids == expected[0][0].token_ids  # it is free again


def test_as_many_bytes_as_before(folder: Path) -> None:
    """Of a prompt that nothing can be shared of, the scheduler reads what passes of the whole batch read."""
    with load(folder, plan=plans(folder)["streaming"]) as engine:
        before = engine.generate([SHORT] * 3, GREEDY)[0]
        after = Together(engine, SHORT, GREEDY, 3).answers()[0]
        assert after.bytes_moved == before.bytes_moved and after.decode_disk_bytes == before.decode_disk_bytes
        assert (after.decode_steps, after.decode_tokens) == (before.decode_steps, before.decode_tokens)


def test_its_prediction_is_of_a_prompt_read_once(folder: Path) -> None:
    ask = {"batch": SEQS, "prompt_tokens": len(LONG), "output_tokens": 9, "context": CONTEXT}
    with load(folder, plan=plans(folder)["resident"], **ask) as engine:
        found, apart = Together(engine, LONG, GREEDY, SEQS).prediction, engine.prediction
        one = Together(engine, LONG, GREEDY, 1).prediction
        assert one.ttft_s < found.ttft_s < apart.ttft_s / 2
        assert found.decode_tokens_per_s == apart.decode_tokens_per_s


@pytest.mark.parametrize("prompt", [[], [-1], [10**6], [1] * (CONTEXT + 1)])
def test_a_wrong_prompt(folder: Path, prompt: list[int]) -> None:
    with load(folder, plan=plans(folder)["resident"]) as engine, pytest.raises(BadRequest):
        Together(engine, prompt, GREEDY, 3)


def test_a_prompt_that_fills_the_context(folder: Path) -> None:
    full = (LONG * 2)[:CONTEXT]
    with load(folder, plan=plans(folder)["resident"]) as engine:
        (alone,) = engine.generate([full], GREEDY)
        answers = Together(engine, full, GREEDY, 6).answers()
        assert [a.token_ids for a in answers] == [alone.token_ids] * 6 and all(a.context_full for a in answers)


@pytest.mark.parametrize("error", [StorageFailed("the disk is gone"), KeyboardInterrupt()])
def test_a_pass_that_fails_ends_it_in_the_callers_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with load(folder, plan=plans(folder)["resident"]) as engine:
        step, calls = engine.session.step, list[Pass]()

        def fails(p: Pass, tokens: list[np.ndarray]) -> list[np.ndarray]:
            calls.append(p)
            if len(calls) == 4:
                raise error
            return step(p, tokens)  # type: ignore[no-any-return]

        monkeypatch.setattr(engine.session, "step", fails)
        with pytest.raises(type(error)):
            Together(engine, SHORT, GREEDY, 11).answers()
        assert len(calls) == 4  # those that waited are not answered for nobody
        monkeypatch.undo()
        assert (
            Together(engine, SHORT, GREEDY, 2).answers()[0].token_ids == engine.generate([SHORT], GREEDY)[0].token_ids
        )


def test_the_command(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = machine_cache(tmp_path / "cache")
    words, flags = "once upon a time " * 8, ("--raw", "--max-tokens", "7", "--ignore-eos", "--cache", cache)
    one = here(capsys, "run", model, words, *flags, "--json").report
    four = here(capsys, "run", model, words, *flags, "--json", "--batch", "4").report
    assert [answer["token_ids"] for answer in four["answers"]] == [one["token_ids"]] * 4
    found = [answer["cached_tokens"] for answer in four["answers"]]
    assert found == [0, *[one["prompt_tokens"] - 1] * 3] and four["batch"] == 4
    assert one["predicted"]["ttft_s"] < four["predicted"]["ttft_s"] < 2 * one["predicted"]["ttft_s"]
    kept = runs(machine_file(cache), MACHINE)[-1]
    assert (kept.batch, kept.first.predicted_s) == (4, four["predicted"]["ttft_s"])
    assert kept.first.measured_s == four["ttft_s"] and kept.decode_steps == 6
    shown = here(capsys, "run", model, words, *flags, "--batch", "4")
    n = one["prompt_tokens"]
    assert f"of the {4 * n} tokens of 4 prompts {3 * n - 3} were read once for several answers" in shown.err
    assert shown.out.split("\n\n") and "tok/s (promised " in shown.err


def test_short_prompts_are_read_beside_each_other(call: Call, model: Path) -> None:
    shown = call("run", model, "ab", "--raw", "--max-tokens", "3", "--ignore-eos", "--batch", "3")
    assert shown.code == 0 and "were read once" not in shown.err
