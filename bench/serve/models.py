"""The models of `bench.serve`, the machine's figures, and servers of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.clients import Stream, served
from bench.offload_engines import tell
from bench.peers import PROMPT_TOKENS, token_ids
from bench.peers import random_gguf as gguf
from penstock.runtime.probe import load_or_probe
from penstock.spec.format import parse_format
from penstock.spec.machine import MachineSpec
from penstock.store.packed import open_packed
from penstock.store.synth import synth

CONTEXT, OUTPUT_TOKENS = 256, 48

Figures = dict[str, Any]


class Bench:
    """The models of `folder`: `large` for budgets, `small` for loads. Both may be one. They are made when they are
    asked for, so that a shape that cannot be made costs the parts that need it alone. `kv`: the format of the KV of all
    of them; None: the default."""

    def __init__(self, folder: Path, large: Path, small: Path, limit: int, kv: str | None = None) -> None:
        self.folder, self.limit = folder, limit
        self.kv_flags = () if kv is None else ("--kv", kv)
        self.configs = {"large": large, "small": small}
        self._vocab: dict[str, int] = {}

    def model(self, name: str) -> Path:
        """The folder of a model. It is written where it is missing, and the machine is measured, which every server
        of it begins with. Raises as `synth` and `load_or_probe`."""
        folder = self.folder / f"{self.configs[name].stem}-int4"
        if not folder.exists():
            tell(f"writing {folder.name}")
            synth(self.configs[name], folder, parse_format("int4"))
        _ = self.machine
        return folder

    @cached_property
    def machine(self) -> MachineSpec:
        return load_or_probe(self.folder / "cache", disk_folder=self.folder, whole=True)

    def vocab(self, name: str) -> int:
        """Entries of a model's vocabulary."""
        if name not in self._vocab:
            self._vocab[name] = open_packed(self.model(name)).spec.vocab
        return self._vocab[name]

    def server(
        self, model: str, limit: int | None, batch: int, context: int, output: int = OUTPUT_TOKENS,
        more: tuple[object, ...] = (),
    ) -> Any:  # fmt: skip
        """A server with KV room for the whole context of each of `batch` answers: requests here take all of it.
        `more`: flags."""
        flags = ("--batch", batch, "--context", context, "--prompt-tokens", PROMPT_TOKENS, "--output-tokens", output)
        kv = ("--kv-tokens", batch * context, *self.kv_flags)
        return served(self.folder, self.model(model), limit, *flags, *kv, *more)

    def streams(self, model: str, count: int, prompt: int, output: int, seed: int = 0) -> list[Stream]:
        vocab = self.vocab(model)
        return [Stream(token_ids(vocab, prompt, seed + i).tolist(), output) for i in range(count)]

    def gguf(self) -> Path:
        file = self.folder / f"{self.configs['large'].stem}-q4_0.gguf"
        if not file.exists():
            tell(f"writing {file.name}")
            gguf.write(self.configs["large"], file)
        return file


def in_turns(turns: Mapping[str, Callable[[], float]], backwards: bool) -> Iterator[Figures]:
    """What the turns give, by their names: after each of them what there is so far. One that fails has no figure: it is
    told why, and the others have theirs."""
    figures: Figures = {}
    for name in reversed(list(turns)) if backwards else turns:
        try:
            figures[name] = turns[name]()
        except (Exception, SystemExit) as error:
            tell(f"{name}: {type(error).__name__}: {error}")
            figures.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:500]
        yield figures


def over(figures: Figures, one: str, other: str) -> float | None:
    """How many times as much one figure is as another; None where one of them is not there."""
    return figures[one] / figures[other] if figures.get(one) is not None and figures.get(other) else None
