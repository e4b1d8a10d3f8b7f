"""Small activations that count as zeros: levels that a text gives, and models that run with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import BadRequest
from penstock.serve import levels
from penstock.serve.kv_store import store_key
from penstock.spec.ask import Ask
from penstock.spec.profile import Profile
from penstock.store.packed import open_packed
from penstock.store.profile_file import FILE, keep
from tests.cpu.commands import Call, refused
from tests.cpu.engines import GREEDY, load, make_model, streaming
from tests.cpu.test_neurons import relu_model
from tests.cpu.test_plans_of_files import quantised_folder
from tests.cpu.test_predict import replace_levels


@pytest.mark.parametrize("weights", ["float32", "float32-neurons", "float32-records", "int4-neurons"])
def test_a_level_leaves_its_share_out(tmp_path: Path, weights: str) -> None:
    """So many do not fire as was asked for; in memory, streamed and beside another sequence answers are the same."""
    folder = make_model(tmp_path, "llama", weights)
    ids = [int(i) for i in np.random.default_rng(1).integers(0, 90, 300)]
    with load(folder, context=64, prompt_tokens=64) as engine:
        assert engine.plan.sparsity == "off"
        found = levels.find(engine, ids, 0.7)
    assert all(abs(each.kept[0] - 0.3) < 0.01 and list(each.kept) == sorted(each.kept) for each in found)
    keep(Profile("text", "0" * 64, len(ids), (), levels=found), folder)
    fired: list[float] = []
    prompts, answers = [[3, 1, 4, 1, 5] * 6, [9, 2, 6]], []
    with load(folder, batch=2, context=64, kv="float32", sparsity="threshold") as engine:
        assert engine.plan.levels == tuple(each.level for each in found)
        assert any("lossy" in reason for reason in engine.solved.reasons)
        plan, sums = engine.plan, engine.packed.sums
        # KV that is kept for later is another one for other levels, and for none.
        others = (plan, replace(plan, levels=tuple(2 * level for level in plan.levels)), replace(plan, sparsity="off"))
        assert len({store_key(each, sums, False) for each in others}) == 3
        answers.append([a.token_ids for a in engine.generate(prompts, GREEDY)])
        with engine.session.hearing.neurons(lambda _layer, _h, live: fired.append(float(live.mean()))):
            engine.generate([ids[:40]], GREEDY)
    assert abs(fired[0] - 0.3) < 0.12
    streams = streaming(open_packed(folder), batch_seqs=2, context=64)
    with load(folder, replace_levels(streams, plan)) as engine:
        answers.append([a.token_ids for a in engine.generate(prompts, GREEDY)])
    alone = []
    for prompt in prompts:
        with load(folder, context=64, kv="float32", sparsity="threshold") as engine:
            alone.append(engine.generate([prompt], GREEDY)[0].token_ids)
    assert answers == [alone, alone]


@pytest.mark.parametrize("kind", ["awq", "float8"])
def test_levels_of_a_quantised_folder(tmp_path: Path, call: Call, kind: str) -> None:
    """At its first use; those of the same numbers in float32."""
    folder = quantised_folder(tmp_path, kind)
    text = tmp_path / "text.txt"
    text.write_text("a text of some words. " * 30)
    wide = tmp_path / f"{kind}-wide"
    found = [
        [
            each["level"]
            for each in call("profile", one, text, "--below", "0.5", "--exact", "--kv", "float32").report["layers"]
        ]
        for one in (folder, wide)
    ]
    np.testing.assert_allclose(*found, rtol=1e-3)
    scores = call("eval", folder, text, "--sparsity", "threshold", "--against", folder).report
    assert scores["kl"] > 0


def test_a_level_of_nothing_changes_no_bit(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "llama", "int4-neurons")
    ids = list(range(3, 67))
    with load(folder, context=64, prompt_tokens=64) as engine:
        found = levels.find(engine, ids, 0.5)
    keep(Profile("text", "0" * 64, 64, (), levels=tuple(replace(each, level=0.0) for each in found)), folder)
    logits = []
    for sparsity in ("off", "threshold"):
        with load(folder, context=64, score=True, sparsity=sparsity) as engine:
            logits.append(engine.logits(ids))
    np.testing.assert_array_equal(*logits)


def test_what_makes_no_sense_is_refused(tmp_path: Path, call: Call) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a text of some words. " * 30)
    plain, fires = make_model(tmp_path, "llama", "float32"), relu_model(tmp_path, "opt", "float32")
    with pytest.raises(BadRequest, match="--below SHARE"):
        load(plain, context=64, sparsity="threshold")
    with pytest.raises(BadRequest, match="has a ReLU"):
        load(fires, context=64, sparsity="threshold")
    refused(call("profile", plain, text), "--below SHARE")
    refused(call("profile", plain, text, "--below", "1"), "between 0 and 1")
    refused(call("profile", fires, text, "--below", "0.5"), "ReLU")
    assert len(call("profile", plain, text, "--below", "0.5").report["layers"]) >= 1
    scores = call("eval", plain, text, "--sparsity", "threshold", "--against", plain, "--json").report
    assert scores["kl"] > 0
    assert call("plan", plain, "--context", "64", "--sparsity", "threshold").report["plan"]["levels"]
    with load(plain, context=64, sparsity="threshold") as engine:
        plan = engine.plan
    for wrong in (plan.levels[1:], (-1.0, *plan.levels[1:]), (float("nan"), *plan.levels[1:])):
        with pytest.raises(BadRequest, match="levels below which"):
            load(plain, replace(plan, levels=wrong))
    with pytest.raises(BadRequest, match="levels below which"):
        load(plain, replace(plan, sparsity="off"))
    whole = (plain / FILE).read_text()
    (plain / FILE).write_text(whole.replace('"level": 0', '"level": -0', 1))
    with pytest.raises(BadRequest, match="makes no sense"):
        load(plain, context=64, sparsity="threshold")
    with pytest.raises(BadRequest, match="sparsity"):
        Ask(sparsity="thresholds")
