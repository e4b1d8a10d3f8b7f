"""The models of `bench.sparsity`, made as they are wanted: OPT-6.7B's shape and a Nemotron with its layers, with random
weights. Those that exact runs compute have neurons that fire at rates as PowerInfer's Figure 4 has them (`penstock
synth --activation-rate`). Records have stated predictors (`bench.stated_predictors`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from bench.stated_predictors import rank_for, state, state_by_rates
from penstock.serve.loading import Loading
from penstock.serve.planning import describe
from penstock.serve.shapes import locate
from penstock.spec.format import parse_format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import Part, parts
from penstock.spec.predictors import part_of
from penstock.store.predictors import FILE as PREDICTORS

OPT, STEEPNESS = "opt-6.7b", 1.03
NEMOTRON = Path(__file__).parent / "shapes" / "nemotron-opt-6.7b.json"
RATES = f"zipf:{STEEPNESS}"
STATED_ACTIVE, STATED_SHARE = 0.05, 0.07  # of the neurons, and of the parameters
LIMIT_BYTES = 2_400_000_000  # of the process that has a part of OPT-6.7B's shape in RAM
_PROCESS_BYTES = 250_000_000  # of that limit, what does not shrink with the layers
PROFILED_TOKENS = 2048
CONTEXT = 128  # of each sequence
# What each part of the bench wants: (shape, format, kind of model).
WANTED = {
    "ram": ((OPT, "int4", ""), (OPT, "int4-neurons", ""), (OPT, "int4-records", "")),
    "disk": ((OPT, "int4-neurons", ""), (OPT, "int4-neurons", "-hot"), (OPT, "int4-records", "")),
    "nemotron": tuple((str(NEMOTRON), name, "") for name in ("int4", "int4-neurons", "int4-records", "q4_0")),
}


class Models:
    """The models in `folder`. `layers`: so many of each shape at most; 0 for all. `cache`: where this machine's figures
    are."""

    def __init__(self, folder: Path, layers: int = 0) -> None:
        self.folder, self.cache, self._layers = folder, folder / "cache", layers

    def config(self, shape: str = OPT) -> Path:
        """The config of a shape, a bundled one's name or a file, with so many layers."""
        source = locate(Path(shape))
        config = json.loads(source.read_text())
        if not self._layers or config["num_hidden_layers"] <= self._layers:
            return source
        target = self.folder / f"{source.stem}-{self._layers}layers.json"
        if not target.exists():
            target.write_text(json.dumps({**config, "num_hidden_layers": self._layers}))
        return target

    def make(self, weights: str, shape: str = OPT) -> Path:
        """A packed model in a format, with rates or with predictors that call the same neurons active for every
        token."""
        config = self.config(shape)
        target = self.folder / f"{config.stem}-{weights}"
        if not target.exists():
            tell(f"writing {target.name}")
            rates = [] if weights.endswith("records") else ["--activation-rate", RATES]  # predictors decide, not rates
            run_penstock("synth", config, target, "--weights", weights, *rates)
        if weights.endswith("records") and not (target / PREDICTORS).exists():
            tell(f"stating predictors of {target.name}")
            state(target, STATED_ACTIVE, STATED_SHARE)
        return target

    def hot_to_cold(self) -> Path:
        """OPT's neurons one by one, in the order of a profile that is made here."""
        model = self.make("int4-neurons")
        target = model.with_name(f"{model.name}-hot")
        if not target.exists():
            tell(f"packing {target.name}")
            text = model.with_name("profiled.txt")
            # The tokenizer of `synth` takes bytes, so this is a text of random printable ones.
            text.write_text("".join(chr(32 + i * i * 7919 % 95) for i in range(PROFILED_TOKENS)))
            run_penstock("profile", model, text, "--tokens", PROFILED_TOKENS)
            run_penstock("pack", model, target, "--profile", model / "profile.json")
        return target

    def with_rates(self, ahead: int = 0) -> Path:
        """OPT's records with predictors that call each neuron active at a rate of its own. Its weights are linked.
        `ahead`: how many layers before its own a predictor hears."""
        model = self.make("int4-records")
        target = model.with_name(f"{model.name}-rates{'-ahead' if ahead else ''}")
        if not (target / PREDICTORS).exists():
            tell(f"stating predictors of {target.name}")
            linked(model, target)
            how = Loading(cache=self.cache)
            state_by_rates(target, STATED_ACTIVE, STATED_SHARE, STEEPNESS, how, ahead)
        return target

    @property
    def limit_bytes(self) -> int:
        """LIMIT_BYTES for the whole shape; with fewer layers a process has the same share of the weights."""
        whole, mine = (_nbytes(parts_of(config, "int4")) for config in (locate(Path(OPT)), self.config()))
        return round(_PROCESS_BYTES + (LIMIT_BYTES - _PROCESS_BYTES) * mine / whole)

    def pair_bytes(self, sequences: int) -> int:
        """Memory of two processes that hold OPT's shape, each with so many sequences."""
        kv = sum(4 * layer.attention.kv_heads * layer.attention.head_dim for layer in describe(self.config())[0].layers)
        return 2 * (_nbytes(parts_of(self.config(), "int4")) + sequences * CONTEXT * kv + _PROCESS_BYTES)

    def missing_bytes(self, wanted: Collection[str]) -> int:
        """Disk space that some parts of the bench take for models that are not there yet."""
        models = {each for name in wanted for each in WANTED.get(name, ())}
        total = 0
        for shape, weights, more in models:
            config = self.config(shape)
            name = f"{config.stem}-{weights}{more}" + (".gguf" if weights == "q4_0" else "")
            if not (self.folder / name).exists():
                total += _nbytes(parts_of(config, "int4" if weights == "q4_0" else weights))
                total += _predictors_bytes(config) * weights.endswith("records") * (3 if shape == OPT else 1)
        return total


def linked(model: Path, target: Path) -> None:
    """The model once more without its predictors, by hard links, or copied where there are none."""
    target.mkdir(exist_ok=True)
    for file in (file for file in model.iterdir() if file.name != PREDICTORS):
        (target / file.name).unlink(missing_ok=True)
        try:
            os.link(file, target / file.name)
        except OSError:
            shutil.copyfile(file, target / file.name)


def parts_of(config: Path, weights: str) -> list[Part]:
    spec, fmt = describe(config, parse_format(weights))
    return list(parts(spec, fmt))


def _nbytes(found: list[Part]) -> int:
    return sum(part.nbytes for part in found)


def _predictors_bytes(config: Path) -> int:
    spec: ModelSpec
    spec, fmt = describe(config, parse_format("int4-records"))
    return len(spec.layers) * part_of(spec, 0, rank_for(spec, fmt, STATED_SHARE)).nbytes


def run_penstock(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "penstock.cli", *map(str, arguments)], check=True)


def tell(text: str) -> None:
    print(text, flush=True)
