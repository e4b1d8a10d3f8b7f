"""Names what a lossy sparsity goes by beside the weights: other predictors or levels give other answers."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from penstock.spec import predictors as spec_predictors
from penstock.spec.model import ModelSpec
from penstock.spec.plan import Plan
from penstock.store import predictors
from penstock.store.profile_file import kept


def what_is_left_out(sparsity: str, folder: Path, spec: ModelSpec, plan: Plan | None) -> str:
    """A name of the predictors (their checksums among it) or of the levels beside a packed model that this sparsity
    goes by, levels of `plan` where one is given; "" where it goes by neither, or none are there. Raises BadRequest,
    BrokenModel and StorageFailed for damaged ones."""
    if sparsity == "predict":
        known = predictors.kept(folder, spec)
        return "" if known is None else sha256(spec_predictors.dumps(known).encode()).hexdigest()
    if sparsity == "threshold":
        profile = kept(folder, spec) if plan is None else None
        levels = plan.levels if plan is not None else tuple(each.level for each in profile.levels) if profile else ()
        return repr(levels) if levels else ""
    return ""
