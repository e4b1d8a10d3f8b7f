"""`penstock train-predictors`: trains what foretells which neurons of a ReLU model fire, for `--sparsity predict`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from penstock.cli.flags import flag
from penstock.cli.loading import loaded, packed_model
from penstock.cli.options import CacheLimit, Json, Machine, Model, Weights, Workload, read_text
from penstock.cli.output import note, print_json, progress
from penstock.cli.text_argument import TEXT_HELP
from penstock.errors import BadRequest
from penstock.units import format_bytes

if TYPE_CHECKING:
    from penstock.serve.training import Trained
    from penstock.spec.model import ModelSpec
    from penstock.spec.plan import Plan
    from penstock.spec.predictors import Predictors


@dataclass(frozen=True)
class Learning:
    """How predictors are trained, and for what."""

    tokens: int | None = flag(
        "--tokens", "N", "Train on at most so many tokens of the text; default 32768, or what is heard.", min=1
    )
    recall: float = flag(
        "--recall", "X", "Of the neurons that fire, call this share active: more costs more false alarms.", 0.98
    )
    seed: int = flag("--seed", "N", "The same seed gives the same predictors.", 0, min=0)
    ahead: bool | None = flag(
        "--ahead/--no-ahead",
        None,
        "Foretell one layer ahead, so that a disk need not wait between layers; costs more false alarms. Default: where"
        " neurons lie on the disk within the limits given here.",
    )

    def goes_ahead(self, plan: Plan) -> bool:
        """Whether predictors are to foretell one layer ahead of their own."""
        from penstock.serve.training import is_for_disk

        if self.ahead is not None or not is_for_disk(plan):
            return bool(self.ahead)
        note("trains them to foretell one layer ahead, since neurons lie on the disk here (--no-ahead does not)")
        return True


def train_predictors(
    model: Model, file: Annotated[str, Option("--text", metavar="FILE", help=TEXT_HELP)], machine: Machine,
    work: Workload, weights: Weights = None, learning: Learning = Learning(), cache_limit: CacheLimit = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train what foretells which neurons fire, for --sparsity predict.

    The model reads the text, and a small network for each layer learns who fires. It is kept beside the packed model,
    in int8, with how well it foretells. `eval --sparsity predict` measures what that costs in quality.
    """
    machine.prepare()
    work.refuse_sizes("train-predictors reads")
    if work.sparsity != "auto":
        raise BadRequest("predictors learn from what a model fires by itself: --sparsity is settled")
    text, ask = read_text(file), work.ask(machine)
    from penstock.serve import training

    training.require_recall(learning.recall)
    source = packed_model(model, weights, machine, cache_limit, require=training.require_relu)
    from penstock.serve.planning import describe
    from penstock.serve.windows import in_windows
    from penstock.store import predictors
    from penstock.store.profile_file import require_place

    spec, fmt = describe(source.folder, verify=not machine.no_verify)
    training.require_relu(spec, str(source.folder))
    require_place(source.folder)
    beside = training.beside_bytes(spec, fmt)
    with loaded(source, in_windows(ask, spec), machine, beside_bytes=beside) as engine, progress() as tell:
        trained = training.train(
            engine,
            text,
            Path(file).name,
            recall=learning.recall,
            seed=learning.seed,
            most_tokens=learning.tokens,
            ahead=int(learning.goes_ahead(engine.plan)),
            on_progress=tell,
        )
        total_bytes = engine.packed.total_bytes
    kept = predictors.keep(trained.predictors, trained.granules, source.folder, spec)
    if as_json:
        _print_json(trained.predictors, spec, kept)
        return
    note(f"kept in {kept}: `--sparsity predict` of this model goes by them")
    _print_table(trained, spec, total_bytes)


def _print_table(trained: Trained, spec: ModelSpec, of_bytes: int) -> None:
    nbytes = sum(granule.nbytes for granule in trained.granules)
    mean = trained.predictors.mean(spec)
    print(
        f"{trained.predictors.tokens} tokens; {format_bytes(nbytes)} of predictors beside {format_bytes(of_bytes)};"
        f" they call {mean.active[0]:.1%} of the neurons active, {mean.recall:.1%} of those that fire"
    )
    print("layer  rank  fires  active  recall  false alarms")
    for each in trained.predictors.layers:
        print(
            f"  {each.layer:3}  {each.rank:4}  {each.fires:5.1%}  {each.active[0]:6.1%}  {each.recall:6.1%}"
            f"  {each.false_alarms:6.1%}"
        )


def _print_json(predictors: Predictors, spec: ModelSpec, kept: Path) -> None:
    mean = predictors.mean(spec)
    print_json(
        {
            "tokens": predictors.tokens, "text_sha256": predictors.text_sha256, "file": str(kept),
            "weights": predictors.weights(spec), "ahead": predictors.ahead, "recall": mean.recall,
            "false_alarms": mean.false_alarms, "active": mean.active[0],
            "layers": [dataclasses.asdict(each) for each in predictors.layers],
        }
    )  # fmt: skip
