"""A user's program: the examples of docs/PYTHON.md, and calls that types are easily wrong about."""

from __future__ import annotations

import re

from tools.wheel.build import ROOT

_MORE = """

def never_called() -> None:
    two: list[list[int]] = [[1], [2]]
    with LLM(MODEL) as again:
        again.generate(two)
        again.generate([1, 2])
        again.generate("He said", SamplingParams(stop="a", json_schema={"type": "object"}))
        again.generate(("He", "said"), SamplingParams(stop=["a", "b"], logit_bias=[(1, -1.5)]))
        again.chat([[{"role": "user", "content": "who?"}], [{"role": "user", "content": "you?"}]])
"""


def examples() -> list[str]:
    """The blocks of code of the page, in its order. They take MODEL, a model's folder, from before."""
    page = (ROOT / "docs/PYTHON.md").read_text()
    return re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def program(model: str) -> str:
    """All of it as one file."""
    return "\n".join([f"MODEL = {model!r}", *examples(), _MORE])
