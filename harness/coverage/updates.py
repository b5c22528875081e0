"""Situations of weight sessions and labels."""

from __future__ import annotations

from collections.abc import Callable

from harness.coverage.family import Facts, Family
from harness.events import Closed, Committed, Launched, PartReceived, Relabelled, Returned, UpdateFailed, UpdateStarted
from harness.operations import FinishWeightUpdate, Spoil, StartWeightUpdate, SwapWeights, UpdateWeights, UpdateWeightVersion, WeightSource


class Sessions(Family):
    def __init__(self, facts: Facts, reached: Callable[[str], None]) -> None:
        super().__init__(facts, reached)
        self._parts: set[int] = set()
        """Of the open session."""
        self._of = 0
        self._sources: list[WeightSource] = []
        """Where the open session's parts came from."""
        self._resident: WeightSource | None = WeightSource(original=True)
        """Where the resident weights came from; None if from several places, or if that is not known."""
        self._earlier: list[WeightSource] = []
        self._labels: set[str] = set()
        """Labels that were resident, the one that is now left out."""

    def before_update_started(self, seq: int, event: UpdateStarted) -> None:
        self._parts, self._of, self._sources = set(), 0, []

    def before_part_received(self, seq: int, event: PartReceived) -> None:
        self._parts.add(event.part)
        self._of = event.of
        if isinstance(self.facts.operation, UpdateWeights | SwapWeights) and self.facts.operation.source not in self._sources:
            self._sources.append(self.facts.operation.source)
        if self._beside_steps:
            self.reached("update-beside-steps")

    @property
    def _beside_steps(self) -> bool:
        return self.replay.update_unpaused and self.replay.pause_mode is None

    def before_launched(self, seq: int, event: Launched) -> None:
        if self.replay.update_open and self.replay.update_wrote:
            self.reached("step-during-update")

    def before_update_failed(self, seq: int, event: UpdateFailed) -> None:
        if event.phase == "update":
            self._refused(event)
        if event.phase == "finish" and not event.wrote:
            self.reached("empty-finish-failed")
        elif event.phase != "update" or event.wrote:
            self.reached(f"update-failed-in-{event.phase}")
        if event.wrote:
            self._now_resident(None)
            if self._beside_steps:
                self.reached("update-failed-beside-steps")

    def _refused(self, event: UpdateFailed) -> None:
        match self.facts.operation:
            case UpdateWeights(source=WeightSource(spoil=Spoil() as spoil)) | SwapWeights(source=WeightSource(spoil=Spoil() as spoil)):
                self.reached(f"refused-for-{spoil.how}")
                self.reached("tensor-refused-half-way" if event.wrote else "tensor-refused")
            case _:
                pass

    def before_committed(self, seq: int, event: Committed) -> None:
        if self.replay.out_of_service:
            self.reached("back-in-service")
        if len(self._parts) > 1:
            self.reached("update-in-parts")
        self._note_label(event.version, again="same-version-again", returned="version-returned")
        if not self._parts:
            self.reached("commit-without-weights")
            return
        source = self._sources[0] if len(self._parts) == self._of and len(self._sources) == 1 else None
        if source is not None and source == self._resident:
            self.reached("same-weights-again")
        elif source in self._earlier:
            self.reached("weights-returned")
        self._now_resident(source)

    def _now_resident(self, source: WeightSource | None) -> None:
        if self._resident is not None and self._resident != source and self._resident not in self._earlier:
            self._earlier.append(self._resident)
        self._resident = source

    def _note_label(self, label: str, *, again: str | None = None, returned: str | None = None) -> None:
        resident = self.replay.weights.version
        if (name := again if label == resident else returned if label in self._labels else None) is not None:
            self.reached(name)
        self._labels.add(resident)

    def before_relabelled(self, seq: int, event: Relabelled) -> None:
        self.reached("version-without-weights")
        self._note_label(event.version)

    def before_returned(self, seq: int, event: Returned) -> None:
        replay = self.replay
        match self.outcome(event):
            case StartWeightUpdate() | SwapWeights(), "conflict" if replay.pause_pending:
                self.reached("start-while-pending")
            case StartWeightUpdate() | SwapWeights(), "conflict" if replay.update_open:
                self.reached("start-in-session")
            case StartWeightUpdate() | SwapWeights(), "conflict" if replay.pause_mode is None:
                self.reached("start-while-running")
            case UpdateWeights(), "conflict":
                self.reached("update-without-session")
            case UpdateWeights(), "invalid":
                self.reached("update-cut-otherwise")
            case FinishWeightUpdate(), "conflict":
                self.reached("partial-update-refused" if replay.update_open else "finish-without-session")
            case UpdateWeightVersion(), "conflict":
                self.reached("version-refused")
            case _:
                pass

    def before_closed(self, seq: int, event: Closed) -> None:
        if event.why == "out-of-service":
            self.reached("stays-out-of-service")
