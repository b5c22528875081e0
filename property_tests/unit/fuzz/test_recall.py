"""What a file shows is known, and nothing beside it: not the same words about another promise, and never a mismatch."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from harness.backends import Backend
from harness.backends.sim import SimBackend
from harness.export import ProfiledSim
from harness.fuzz.case import CONFORMANCE, Case, Signature, run_case
from harness.fuzz.hunt import Settings
from harness.fuzz.recall import recall
from harness.model.profile import Profile
from harness.operations import Operation, Pause, Perturbation, Prompt, Resume, Step, Submit, SwapWeights, WeightSource
from harness.scenario import EngineShape, dump

DIFFERENCES = Path(__file__).parents[3] / "scenarios" / "differences"
SHAPE = EngineShape(block_size=4, num_blocks=12, max_model_len=40, max_num_seqs=4, max_num_batched_tokens=16)
SUBMIT = Submit(id="r1", prompt=Prompt(tokens=3), max_tokens=6)
NEW_WEIGHTS = SwapWeights(source=WeightSource(perturb=Perturbation(seed=1, scale=0.05)))


def like_vllm() -> ProfiledSim:
    """The model under the profile of vLLM: what is known of that, it shows, too."""
    return ProfiledSim(Profile.named("vllm-0.32"))


def recalled(file: Path, backend: Backend) -> set[Signature]:
    return {one.signature for one in recall(str(file), backend, Settings())}


def stale(*operations: Operation) -> Signature:
    finding = run_case(Case(engine=SHAPE, operations=operations), like_vllm()).finding("cache-epoch")
    assert finding is not None and finding.sentence == "step 3 of r1 attends to stale KV"
    return Signature.of(finding)


def test_stale_kv_after_a_promised_clear_is_new_where_that_of_an_unpaused_update_is_known():
    known = recalled(DIFFERENCES / "new_weights_over_old_kv.yaml", like_vllm())
    assert stale(SUBMIT, Step(), Step(), NEW_WEIGHTS) in known
    skipped = (Pause(mode="wait", clear_cache=True), Pause(mode="keep", clear_cache=False), NEW_WEIGHTS, Resume())
    assert stale(SUBMIT, Step(), Step(), *skipped) not in known


def test_what_the_model_does_not_explain_is_never_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    backend = SimBackend()
    right = backend.state
    monkeypatch.setattr(backend, "name", "broken")
    monkeypatch.setattr(backend, "state", lambda: msgspec.structs.replace(right(), weight_version="v9"))
    case = Case(engine=SHAPE, operations=(SUBMIT,))
    assert [finding.id for finding in run_case(case, backend).findings] == [CONFORMANCE]
    (tmp_path / "file.yaml").write_text(dump(case.scenario("file")))
    assert recalled(tmp_path / "file.yaml", backend) == set()
