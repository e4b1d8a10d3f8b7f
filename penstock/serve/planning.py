"""Makes a plan from a model's folder and the user's wishes. `penstock plan` and the engine share this."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import BadRequest, PenstockError, UnsupportedModel
from penstock.hubs.where import Where
from penstock.models import own_weights, sources
from penstock.models.hf.quantization import CODES, KEY, Quantization, quantization_of
from penstock.planner.firing import Firing, expected, foretold, leveled, sparsity_of
from penstock.planner.firing import measured as by_profile
from penstock.planner.routing import RouterTrace, called, firing, recorded
from penstock.planner.solve import Solved, solve
from penstock.serve import shapes
from penstock.serve.named import to_plan
from penstock.spec.ask import Ask
from penstock.spec.format import FLOAT32, Format, mixture, parse_format
from penstock.spec.machine import MachineSpec
from penstock.spec.model import ModelSpec
from penstock.spec.parts import MIXED, parts
from penstock.spec.predictors import Predictors
from penstock.spec.widened import as_kept
from penstock.store import manifest as manifests
from penstock.store.gguf.header import is_gguf
from penstock.store.header import KINDS, TensorInfo, quoted, read_header
from penstock.store.manifest import CONFIG
from penstock.store.packed import is_packed, orders_of, part_disks, read_config, read_manifest
from penstock.store.profile_file import kept


def default_cache() -> Path:
    """The folder of packed models and machine files, unless the user names another. Raises BadRequest where the user
    has no home folder."""
    try:
        return Path.home() / ".cache" / "penstock"
    except RuntimeError:
        raise BadRequest("this user has no home folder: name a cache folder (--cache DIR)") from None


def describe(
    model: Path, weights: Format | None = None, verify: bool = True, *, to_plan: bool = False
) -> tuple[ModelSpec, Format]:
    """A model's spec, and the format that its weights have or would have once packed.

    `model`: a folder, a config.json, a GGUF file, or where there is no such path the name of a bundled shape.
    `weights`: the format to pack to, if not the model's own. `verify`: a packed model's config.json is compared with
    its checksum. `to_plan`: the model is only planned, so a type that does not run yet will do. Raises BadRequest,
    BrokenModel, UnsupportedModel, DamagedModel.
    """
    model = shapes.locate(model)
    manifest = read_manifest(model) if is_packed(model) else None
    config, spec = read_config(model, manifest.files if verify and manifest is not None else (), to_plan=to_plan)
    if manifest is not None:
        return spec, weights or manifests.formats(manifest)
    how = quantization_of(config, str(model))
    if is_gguf(model) or (how is not None and model.is_dir() and any(model.glob("*.safetensors"))):
        from penstock.store.own import own_model  # with numpy, which planning goes without

        return own_model(model, weights)
    if how is None and KEY not in config and model.is_dir():
        if _kinds(model) - {spec.dtype}:  # config.json says another one than the files have, or not all have one
            from penstock.store.own import own_model

            with suppress(PenstockError):
                return own_model(model, weights)
        return spec, weights or Format(spec.dtype)
    if weights is not None:
        return spec, weights
    return spec, own_weights(config, spec, str(model)) if how is None else _quantised(spec, how, str(model))


def _kinds(folder: Path) -> set[str]:
    """The number formats of a checkpoint's matrices of floats, by its files' headers. Those that cannot be read are for
    `pack` to complain of: a plan needs config.json alone. Raises UnsupportedModel where there are quantised tensors,
    which its config.json says nothing of."""
    found: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        tensors: Mapping[str, TensorInfo] = {}
        with suppress(PenstockError):
            tensors = read_header(file).tensors
        for name, tensor in tensors.items():
            if _has_codes(name, tensor.dtype):
                raise UnsupportedModel(
                    f"{folder} has {quoted(name)}, which is quantised, but no {KEY} in {CONFIG} that says how"
                )
            if len(tensor.shape) > 1 and tensor.dtype in KINDS:
                found.add(KINDS[tensor.dtype])
    return found


def _has_codes(name: str, dtype: str) -> bool:
    last = name.rpartition(".")[2]
    return last in CODES or (last == "weight" and dtype == "F8_E4M3")


def _quantised(spec: ModelSpec, how: Quantization, where: str) -> Format:
    """The formats of a checkpoint whose config.json alone is there: all matrices of layers were quantised, but for
    those of the modules that it names. Raises UnsupportedModel for a model that cannot have them."""
    places, table = sources(spec), dict[str, Format]()
    for part in parts(spec, FLOAT32):
        for block in part.blocks if part.kind in MIXED else ():
            if block.tiled:
                module = places[part.key, block.name].tensor.removesuffix(".weight")
                kept = part.kind == "embed" or (part.kind == "head" and not how.head) or how.skips(module)
                table[f"{part.key}.{block.name}"] = Format(spec.dtype) if kept else parse_format(how.kind)
    mixed = mixture(as_kept(table, spec))
    try:
        parts(spec, mixed)
    except BadRequest as error:
        raise UnsupportedModel(f"{where}: {error.message}") from None
    return mixed


def plan(
    model: str | Path,
    *,
    machine: MachineSpec | None = None,
    weights: str | None = None,
    cache: str | Path | None = None,
    where: Where | None = None,
    **ask: Any,
) -> Solved:
    """Where everything of a model would go and how fast it would be, before a byte is loaded.

    `model`: as `LLM`'s, a config.json, or the name of a bundled shape; of a model of the Hub that is not here only
    headers are read. `machine`: None for this one, which is probed once, and taken as its runs of the last days show
    it. `cache`: the folder that keeps its figures. `where`: places to look for models besides paths. `ask`: the fields
    of `spec.ask.Ask`, sizes in bytes. Raises DoesNotFit, BadRequest, UnsupportedModel or BrokenModel.
    """
    asked = Ask(**ask)
    with to_plan(str(model), where or Where()) as path:
        spec, fmt = describe(path, parse_format(weights) if weights else None, to_plan=True)
        if machine is None:
            from penstock.runtime.probe import load_or_probe, machine_file
            from penstock.serve.lately import as_runs_show

            folder = Path(cache) if cache is not None else default_cache()
            measured, file = load_or_probe(folder), machine_file(folder)
            machine = as_runs_show(file, measured, fmt.name, sparsity_of(asked.sparsity, spec)).machine
        beside = with_facts(path, spec, fmt if weights else None, None if cache is None else Path(cache))
        routers, firing = routers_of(beside, spec, asked.sparsity), firing_of(beside, spec, asked.sparsity)
        return solve(asked, spec, fmt, machine, part_disks(path), trace=routers, firing=firing)


def with_facts(model: Path, spec: ModelSpec, weights: Format | None, cache: Path | None) -> Path:
    """The folder that has what is known of a model beside its weights, its profile and its predictors: of a checkpoint
    its packed copy in the folder `cache` (None: the user's), where that has one in this format (None: its own) of the
    files as they are now; else the model itself."""
    if not (spec.is_routed or spec.fires) or is_packed(model) or not (model.is_dir() or is_gguf(model)):
        return model
    from penstock.store import copies, identity  # with numpy, which planning of other models goes without

    with suppress(PenstockError):
        now = identity.stamps(model)
        for folder, record in copies.records((cache or default_cache()).absolute() / copies.MODELS).items():
            alike = [known for known in record.origins if known.stamps == now]
            wanted = any(known.own for known in alike) if weights is None else record.weights == weights.name
            if alike and wanted and is_packed(folder):
                return folder
    return model


def firing_of(model: Path, spec: ModelSpec, sparsity: str) -> Firing | None:
    """How many neurons of a packed model fire, by its profile; None where it has no profile, or where all fire. Where
    the `sparsity` that is asked for is predict, also what its predictors are known to do; where it is threshold, the
    levels of its profile. Raises as `routers_of`."""
    if sparsity == "threshold" and is_packed(model):
        return leveled(kept(model, spec), spec)
    if not (spec.fires and is_packed(model)):
        return None
    firing = by_profile(kept(model, spec))
    predictors = _predictors(model, spec, sparsity)
    if predictors is None:
        return firing
    return replace(firing or expected(spec), foretold=foretold(predictors, spec))


def routers_of(model: Path, spec: ModelSpec, sparsity: str) -> RouterTrace | None:
    """What the routers of a packed model said to the text of its profile, or how often its neurons fired, or with
    `sparsity` predict are called active; None where neither a profile nor predictors say it. Raises BadRequest and
    BrokenModel for a profile that is damaged, or of another model."""
    if not ((spec.is_routed or spec.fires) and is_packed(model)):
        return None
    profile = kept(model, spec)
    if not spec.fires:
        return None if profile is None else recorded(profile, spec)
    known = None if profile is None else firing(profile, orders_of(model, read_manifest(model), spec))
    predictors = _predictors(model, spec, sparsity)
    return known if predictors is None else called(spec, predictors, known)


def _predictors(model: Path, spec: ModelSpec, sparsity: str) -> Predictors | None:
    """What is kept beside a packed model of its predictors, where a plan is to have some. With the native extension,
    which checks them, and which other plans go without."""
    if sparsity != "predict":
        return None
    from penstock.store import predictors

    return predictors.kept(model, spec)
