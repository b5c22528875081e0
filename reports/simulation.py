"""How a simulated workload fared, in a few lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.simulation.figures import Figures

LONG_LIST = 8
"""Of more ages than this, the oldest are told together."""


def figure_lines(figures: Figures, *, margin: int) -> list[str]:
    """Each line begins with what it is about, in a column of `margin` characters."""
    rows = [("simulated", _simulated(figures)), ("rollouts", _rollouts(figures))]
    if figures.updates:
        rows += [("updates", _updates(figures)), ("staleness", _staleness(figures))]
    recomputed = f"{_share(figures.recomputed, figures.computed)} of all tokens computed; {figures.preemptions:,} preemptions"
    rows.append(("recomputed", recomputed))
    return [f"{name:<{margin}}{text}" for name, text in rows]


def percentile(values: Sequence[int], percent: int) -> int:
    """The nearest-rank percentile of sorted values, of which there is at least one."""
    return values[max(0, -(-len(values) * percent // 100) - 1)]


def _simulated(figures: Figures) -> str:
    seconds = figures.duration_ns / 1e9
    rate = f"{figures.tokens / seconds:,.0f} tokens/s" if seconds else "no time passed"
    return f"{seconds:,.3f} s in {figures.steps:,} steps: {figures.tokens:,} tokens, {rate}"


def _rollouts(figures: Figures) -> str:
    ended = f"{len(figures.latencies_ns):,} of {figures.rollouts:,} ended"
    if not figures.latencies_ns:
        return ended
    whole, first = _percentiles(figures.latencies_ns), _percentiles(figures.first_tokens_ns)
    return f"{ended}, p50/p90/p99 after {whole}; first token after {first}"


def _percentiles(times_ns: Sequence[int]) -> str:
    ordered = sorted(times_ns)
    return "/".join(f"{percentile(ordered, percent) / 1e9:.3g}" for percent in (50, 90, 99)) + " s"


def _updates(figures: Figures) -> str:
    held = _share(figures.held_ns, figures.duration_ns)
    trained = f", {figures.trained_tokens:,} tokens trained on" if figures.trained_tokens else ""
    return f"{figures.updates:,}{trained}; paused {figures.held_ns / 1e9:.3f} s ({held}), {figures.draining_ns / 1e9:.3f} s until quiet"


def _staleness(figures: Figures) -> str:
    counts = figures.staleness
    total = sum(counts.values())
    if not total:
        return f"nothing trained on, {figures.dropped:,} rollouts dropped"
    mean = sum(age * count for age, count in counts.items()) / total
    dropped = f"; {figures.dropped:,} dropped" if figures.dropped else ""
    return f"mean {mean:.2f}, most {max(counts)} updates ({_ages(counts)}){dropped}"


def _ages(counts: Mapping[int, int]) -> str:
    ages = [f"{age}: {count:,}" for age, count in counts.items()]
    if len(ages) > LONG_LIST:
        older = sum(list(counts.values())[LONG_LIST - 1 :])
        ages = [*ages[: LONG_LIST - 1], f"older: {older:,}"]
    return ", ".join(ages)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none"
