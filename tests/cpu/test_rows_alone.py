"""A token's logits are the same whatever rows are read with it, in every family of models."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from penstock.serve.sampling import SamplingParams
from penstock.serve.service import Service
from tests.cpu.configs import TINY_CONFIGS
from tests.cpu.engines import load, make_model


@pytest.mark.parametrize("name", sorted(TINY_CONFIGS))
@pytest.mark.parametrize("weights", ["float32", "int4"])
def test_a_prompt_that_is_partly_there_has_the_logits_of_one_that_is_read_whole(
    name: str, weights: str, tmp_path: Path
) -> None:
    folder = make_model(tmp_path, name, weights)
    prompts = [[(7 * i * i + n) % 300 for i in range(n)] for n in (2, 5, 9, 24, 41, 70)]
    params = SamplingParams(max_tokens=3, ignore_eos=True, logprobs=1)

    def said(answers: list[Any]) -> list[Any]:
        return [(each.token_ids, each.logprobs) for each in answers]

    with load(folder, context=160, batch=len(prompts)) as engine:
        alone = said([engine.generate([ids], params)[0] for ids in prompts])
        with closing(Service.of_whole_answers(engine)) as service:
            assert said(service.generate(prompts, params)) == alone
            again = service.generate(prompts, params)  # only the last row of each is read
    assert [each.cached_tokens for each in again] == [len(ids) - 1 for ids in prompts]
    assert said(again) == alone
