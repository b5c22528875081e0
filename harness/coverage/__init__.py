"""Coverage: which situations a log reaches, how often, and at which event first.

A few watchers, one for each family of situations.py, see the log go by in the way that invariants
do, beside the same replay. They judge nothing, so they take any log; what happens in every step
costs them next to nothing, because most of them only look where something was about to change.
"""

from harness.coverage.counting import ClientSituations, Coverage, Sighting, Situations, merged

__all__ = ["ClientSituations", "Coverage", "Sighting", "Situations", "merged"]
