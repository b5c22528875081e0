"""What scenario files show on the engine at hand: failures that are known, because somebody wrote them down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.backends import Backend, LiveBackend
from harness.fuzz.case import ENDS, Case, Signature, not_drained, run_case
from harness.fuzz.hunt import Settings
from harness.fuzz.known import Known
from harness.scenario import Scenario, load_scenario
from harness.trial import Trial, check_possible, run_trial


def recall(file: str, backend: Backend | LiveBackend, settings: Settings) -> Iterator[Known]:
    """What the file shows on this engine. One with triggers is run as `caesura run` does, and what invariants say of it counts,
    and that it took the engine down.

    Raises:
        BackendError, ScenarioError: the engine cannot be started, the file cannot be read.
    """
    scenario = load_scenario(file)
    if any(entry.when is not None for entry in scenario.timeline) and not isinstance(backend, LiveBackend):
        signatures = _violated(_run(scenario, backend))
    else:
        outcome = run_case(Case.of(scenario), backend, explain=settings.explain, drain=False, hang_s=settings.hang_s)
        signatures = map(Signature.of, outcome.findings)
    return (Known(signature, file) for signature in signatures)


def _run(scenario: Scenario, backend: Backend) -> Trial:
    info = backend.start(scenario.engine)
    try:
        check_possible(scenario, backend, info)
        with TemporaryDirectory() as folder:
            return run_trial(scenario, backend, info, Path(folder))
    finally:
        backend.stop()


def _violated(trial: Trial) -> Iterator[Signature]:
    for judgement in trial.verdict.judgements:
        for violation in judgement.violations:
            yield Signature.worded(judgement.invariant, violation.sentence)
    if (closed := trial.closed) is not None and closed.why == "failed":
        yield Signature.worded(ENDS, not_drained(closed.why, trial.entries))
