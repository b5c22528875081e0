"""Situations: the cases that the promises tell apart, one name for each.

That an invariant held says little about a run in which nothing it speaks of came about. So a
scenario names what it is to reach (`expect: reaches:`), and runs and campaigns count what they
reached (coverage/). Here are the names and what each stands for; they stand above the loader of
scenario files, which refuses a name that nobody has. docs/situations.md is made from this table.
"""

from __future__ import annotations

from typing import get_args

from harness.operations import Mode

MODES: tuple[Mode, ...] = get_args(Mode)

LATE = {
    "queued": "was parked in the core",
    "rejected": "was refused",
    "blocked": "was held in front of the core",
}
"""What becomes of a late request, by policy."""

IN_FLIGHT = "Steps in flight"
"""The family of what only an engine reaches that schedules a step while another is in flight (`async_scheduling`)."""

FAMILIES: dict[str, dict[str, str]] = {
    "Pauses and resumes": {
        **{f"{mode}-pause-cleared": f"A pause({mode}) that met live requests took effect and cleared the cache." for mode in MODES},
        **{f"{mode}-pause-kept": f"A pause({mode}) that met live requests took effect and kept the cache." for mode in MODES},
        "empty-pause": "A pause that met no live request took effect.",
        "left-paused": "The run ended under a pause, with live requests.",
        "is-paused-while-pending": "`is_paused` was asked while a pause was pending.",
        "resume-while-running": "A resume came with nothing paused.",
        "resume-in-session": "A resume was refused because a weight session was open.",
        "resume-out-of-service": "A resume was refused because the engine was out of service.",
        "wait-in-session": "A pause(wait) was refused because a weight session was open.",
        "wait-out-of-service": "A pause(wait) was refused because the engine was out of service.",
        "wait-for-waiting": "A pause(wait) was taken up while a request had never run.",
        "wait-for-half-prefilled": "A pause(wait) was taken up while a request was half-way through its prompt.",
        "wait-for-preempted": "A pause(wait) was taken up while a request had lost its blocks.",
        "wait-for-frozen": "A pause(wait) was taken up over an effective pause with requests frozen in mid-run.",
        "wait-for-parked": "A pause(wait) was taken up while a request was parked.",
    },
    "Pause calls that meet": {
        **{f"{new}-over-paused-{old}": f"A pause({new}) came while a pause({old}) was effective." for old in MODES for new in MODES},
        **{f"{new}-over-pending-wait": f"A pause({new}) came while a pause(wait) was pending." for new in MODES},
        "resume-over-pending-wait": "A resume came while a pause(wait) was pending.",
        "pause-joined": "Pause calls that met took effect together.",
        "pause-superseded": "A pause call failed because a later pause froze what it waited for.",
        "clear-asked-by-one": "Of pause calls that took effect together, some asked for a clear and some did not.",
        "clear-after-kept": "A pause that clears took effect over one that had kept the cache.",
    },
    "Sleep and wake": {
        **{f"asleep-at-level-{level}": f"A sleep at level {level} took effect." for level in (0, 1, 2)},
        **{f"sleep-by-{mode}": f"A sleep that paused by `{mode}` took effect over live requests." for mode in MODES},
        "sleep-joins-pause": "A sleep without a mode came under a pause that was effective.",
        "sleep-joins-pending": "A sleep without a mode came while a pause was pending.",
        "sleep-over-frozen": "A sleep took effect while requests were frozen in mid-run or parked.",
        "sleep-superseded": "A sleep call failed because its pause was overridden.",
        "sleep-in-session": "A sleep was refused because a weight session was open.",
        "sleep-again": "A sleeping engine was put to sleep again, no deeper than before.",
        "sleep-deeper": "A sleeping engine was put to sleep at a higher level.",
        "partial-wake": "Memory of one kind was mapped while the other sleeps.",
        "wake-of-awake": "A wake-up found nothing to wake.",
        "wake-ends-pause": "A wake-up ended the pause, which sleep alone had made.",
        "wake-keeps-pause": "A full wake-up left a pause that a pause call had asked for.",
        "woke-without-weights": "The weights woke after a sleep that had dropped them.",
        "update-ends-pause": "An update, committed after a wake-up, ended the pause that sleep alone had made.",
        "update-while-cache-sleeps": "An update was committed while the KV memory slept.",
        "start-asleep": "A session was refused because the weights slept.",
        "resume-asleep": "A resume was refused because the engine slept.",
        "wait-asleep": "A pause(wait) was refused because the engine slept.",
        "pause-asleep": "A sleeping engine was paused.",
        "late-request-asleep": "A request came while the engine slept.",
        "abort-asleep": "A request was aborted while the engine slept.",
        "reset-asleep": "A reset was carried out while the KV memory slept.",
    },
    "Late requests": {
        **{
            f"late-request-{policy}-under-{mode}": f"A request that came under a pause({mode}) {became}."
            for policy, became in LATE.items()
            for mode in MODES
        },
        **{f"late-request-{policy}-out-of-service": f"A request that came out of service {became}." for policy, became in LATE.items()},
        "late-request-while-pending": "A request came while a pause was pending.",
    },
    "Aborts": {
        "abort-of-running": "A running request was aborted.",
        "abort-mid-prefill": "A request half-way through its prompt was aborted.",
        "abort-of-frozen": "A request frozen in mid-run by a pause was aborted.",
        "abort-of-waiting": "A request that never ran was aborted.",
        "abort-of-preempted": "A request that had lost its blocks was aborted.",
        "abort-of-parked": "A parked request was aborted.",
        "abort-of-blocked": "A request held in front of the core was aborted.",
        "abort-of-nobody": "An abort named a request that had ended or never was.",
        "abort-while-pending": "A client aborted a request while a pause was pending.",
        "abort-in-session": "A request was aborted while a weight session was open.",
        "abort-out-of-service": "A request was aborted out of service.",
    },
    "Prefill and preemption": {
        "chunked-prefill": "A step computed a part of a prompt that did not reach its end.",
        "chunked-prefill-across-pause": "A pause caught a request half-way through its prompt, and did not end it.",
        "preempted-by-pressure": "A request lost its blocks to another one.",
        "preempted-by-itself": "A request, the last running, gave its own blocks back as there were none left.",
        "preempted-twice": "A request lost its blocks to pressure for the second time.",
        "preempted-mid-prefill": "A request lost its blocks half-way through its prompt.",
        "preempted-while-pending": "A request lost its blocks to pressure while a pause was pending.",
        "preempted-while-paused": "A pause took effect while a request that had lost its blocks to pressure waited.",
        "clear-with-frozen": "A pause that clears took the blocks of frozen requests.",
    },
    "Cache": {
        "prefix-hit": "A request was admitted with blocks that were cached or another's.",
        "prefix-shared-while-running": "A request hit blocks that another one holds.",
        "prefix-shared-in-one-step": "A request hit a block that the same step writes.",
        "hit-after-preemption": "A preempted request came back and hit blocks.",
        "hit-on-block-of-aborted": "A request hit a block that an aborted one left.",
        "equal-blocks": "A block was published whose contents another block has too.",
        "eviction": "A cached block was taken for new contents.",
        "block-shared-at-free": "A request let go of blocks that others go on holding.",
        "reset-of-idle": "A reset was carried out with no block held.",
        "reset-refused": "A reset was refused because blocks were held.",
        "reset-with-frozen": "A reset under a pause took the blocks of frozen requests.",
        "clear-of-shared-blocks": "A clear or a reset took blocks that several requests held.",
    },
    "Host tier": {
        "offloaded": "An evicted block was copied to the host.",
        "copy-replaced": "A copy on the host was given up for another one.",
        "evicted-with-copy": "A block was evicted whose contents are on the host, or in another block, already.",
        "loaded": "A request was admitted with blocks that came back from the host.",
        "loaded-behind-hits": "A request was admitted with blocks from the host behind others that it hit.",
        "loaded-after-preemption": "A preempted request came back and its blocks came from the host.",
        "loaded-older-epoch": "A request was admitted with a copy of what older weights wrote.",
        "clear-of-copies": "A clear or a reset emptied a host tier that held copies.",
    },
    "Across an update": {
        "request-across-boundary": "A request was given a token by other weights than its last one.",
        "request-across-two-boundaries": "A request was given tokens by three weights.",
        "token-over-stale-kv": "A token was sampled over KV that older weights computed.",
        "kv-of-three-epochs": "A token was sampled over KV that three weights computed.",
        "recomputed-by-new-weights": "A request with tokens of older weights was prefilled again from its first token by new ones.",
        "chunked-prefill-across-boundary": "Older weights computed one part of a prompt, newer ones another.",
        "block-filled-across-boundary": "A block was begun by older weights and filled by newer ones.",
        "prefix-hit-on-older-epoch": "A request hit a block that older weights wrote.",
        "request-under-two-labels": "A request's version changed although its weights did not.",
    },
    "Weight sessions": {
        "update-in-parts": "A session of several parts was committed.",
        "update-beside-steps": "A session allowed beside steps wrote weights while the engine was running.",
        "step-during-update": "A step was launched between the first byte of a session and its end.",
        "commit-without-weights": "A session was committed that had written nothing.",
        "same-weights-again": "An update wrote the weights that were resident.",
        "weights-returned": "An update brought back weights that were resident before others.",
        "same-version-again": "An update was committed under the label that was resident.",
        "version-returned": "An update was committed under a label that was resident before others.",
        "version-without-weights": "The label was set without touching weights.",
        "version-refused": "Setting the label was refused because no pause was effective.",
        "start-while-running": "A session was refused because no pause was effective.",
        "start-while-pending": "A session was refused because a pause was pending.",
        "start-in-session": "A session was refused because one was open.",
        "update-without-session": "A part was refused because no session was open.",
        "finish-without-session": "A finish was refused because no session was open.",
        "update-cut-otherwise": "A part was refused because the session's earlier ones are of another number of parts.",
        "update-failed-in-start": "A session failed to start.",
        "update-failed-in-update": "A session failed in the middle of a part.",
        "update-failed-in-finish": "A session failed at its end, with weights written.",
        "empty-finish-failed": "A session failed at its end with nothing written, and stays open.",
        **{
            f"refused-for-{how}": f"A tensor was refused before it was written: {what}."
            for how, what in (
                ("name", "its name matches nothing"),
                ("shape", "its shape is another"),
                ("nan", "it holds NaN"),
                ("infinity", "it holds infinity"),
            )
        },
        "tensor-refused": "A tensor was refused before any was written, and the session stays open.",
        "tensor-refused-half-way": "A tensor was refused after others of its session had been written.",
        "update-failed-beside-steps": "A session failed that was writing weights while the engine was running.",
        "partial-update-refused": "Out of service, a finish was refused because not every tensor was sent.",
        "back-in-service": "A full update ended being out of service.",
        "stays-out-of-service": "The run ended out of service.",
    },
    "Ends and refusals": {
        "finished-by-length": "A request reached its max_tokens.",
        "finished-by-max-model-len": "A request reached max_model_len before its max_tokens.",
        "finished-by-stop": "A request ended by an end-of-sequence token.",
        "request-refused": "A request that can never run was refused: empty, too long, or larger than the pool.",
        "live-id-refused": "A request was refused because another of that id was live.",
        "id-used-again": "The id of a request that had ended was taken on again.",
        "step-failed": "A forward pass broke.",
    },
    IN_FLIGHT: {
        "pause-over-step-in-flight": "A pause was taken up with a step in flight.",
        **{
            f"{new}-over-pending-{old}": f"A pause({new}) came while a pause({old}) was pending."
            for old in ("abort", "keep")
            for new in MODES
        },
        **{f"resume-over-pending-{old}": f"A resume came while a pause({old}) was pending." for old in ("abort", "keep")},
        "preempted-in-flight": "A request lost its blocks to pressure with a token of it in flight.",
        "token-dropped-aborted": "A token was dropped because its request had been aborted since the launch.",
        "token-dropped-finished": "A token was dropped because its request had ended since the launch.",
        "token-dropped-reset": "A token was dropped because its request had been preempted by a reset since the launch.",
    },
}
"""By family: each situation's name and what came about, in one line."""

SITUATIONS: dict[str, str] = {name: statement for family in FAMILIES.values() for name, statement in family.items()}
"""Every situation by its name."""


def page() -> str:
    """What docs/situations.md holds."""
    lines = [
        "# Situations",
        "",
        f"The {len(SITUATIONS)} cases that the promises tell apart. A run counts those that it reaches: the report says how many, and",
        "`coverage.txt` in the run folder lists all of them, with how often and at which event first. A scenario that names some in",
        "`expect: {reaches: [...]}` is `unknown` if one of them did not come about. Made from `harness/situations.py`.",
    ]
    for family, situations in FAMILIES.items():
        lines += ["", f"## {family}", ""]
        if family == IN_FLIGHT:
            lines += ["Only with `async_scheduling`, when a step is scheduled while another is in flight.", ""]
        lines += ["| situation | what came about |", "|---|---|"]
        lines += [f"| `{name}` | {statement} |" for name, statement in situations.items()]
    return "\n".join(lines) + "\n"
