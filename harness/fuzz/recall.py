"""What scenario files show on the engine at hand: failures that are known, because somebody wrote them down.

That the model does not explain what an engine does is never known: a file's mismatch would stand for everyone's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.backends import Backend, LiveBackend
from harness.errors import BadInput
from harness.fuzz.case import API_TRUTH, CONFORMANCE, ENDS, Case, Signature, crashed, not_drained, run_case
from harness.fuzz.hunt import Settings
from harness.fuzz.known import Known
from harness.fuzz.watchdog import EngineHangs, watched
from harness.scenario import Scenario, load_scenario
from harness.trial import Trial, check_possible, run_trial
from harness.verdict import wording


def recall(file: str, backend: Backend | LiveBackend, settings: Settings) -> Iterator[Known]:
    """What the file shows on this engine: what invariants say of it, and that it took the engine down.

    Raises:
        CannotRun: the file asks for what the engine cannot be asked for.
        BadInput: the engine cannot be started, the file cannot be read, or one with triggers hangs.
    """
    scenario = load_scenario(file)
    if any(entry.when is not None for entry in scenario.timeline) and not isinstance(backend, LiveBackend):
        signatures = _shown(_run(scenario, backend, settings.hang_s))
    else:
        outcome = run_case(Case.of(scenario), backend, explain=settings.explain, drain=False, hang_s=settings.hang_s)
        signatures = map(Signature.of, outcome.findings)
    return (Known(signature, file) for signature in signatures if signature.id != CONFORMANCE)


def _run(scenario: Scenario, backend: Backend, hang_s: float) -> Trial:
    """As `caesura run` does."""
    info = backend.start(scenario.engine)
    try:
        check_possible(scenario, backend, info)
        with TemporaryDirectory() as folder, watched(hang_s):
            return run_trial(scenario, backend, info, Path(folder))
    except EngineHangs:
        raise BadInput(f"the engine hangs: no answer within {hang_s:g} s") from None
    finally:
        backend.stop()


def _shown(trial: Trial) -> Iterator[Signature]:
    """The signatures that a case would have which does the same."""
    for judgement in trial.verdict.judgements:
        for violation in judgement.violations:
            yield Signature(judgement.invariant, violation.wording)
    closed = trial.closed
    if closed is not None and closed.why == "failed":
        yield Signature(ENDS, wording(not_drained(closed.why, trial.entries)))
    if closed is not None and closed.why == "crashed":
        during, _, error = closed.error.partition(": ")
        # A case names the verb alone and does not count steps.
        asked = re.match(r"in (?:call #\d+, \w+|\w+)", during)
        yield Signature(API_TRUTH, wording(crashed(f"{asked[0] if asked else during}: {error}")))
