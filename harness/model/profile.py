"""What engines that follow the same rules do differently, as data.

A field exists only where an engine in use departs from docs/semantics.md. Conformance
compares an engine with its own profile; invariants judge every engine by the promises.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The defaults are what the contract promises and our engine does."""

    name: str

    empty_steps: bool = False
    """A request that ended keeps the engine stepping until one more step, empty if need be,
    has told the workers (vLLM). An empty step launches an empty batch and counts as a step;
    a pause of any mode is pending until it was made."""

    wait_admits_waiting: bool = True
    """A pending `wait` still admits requests accepted before it. False: only those running then
    run to their end; whoever waits or is preempted stays in the queue until resume (vLLM's PAUSED_NEW)."""

    uncached_freed_to: Literal["head", "tail"] = "head"
    """Where in the free queue released blocks go when prefix caching is off (vLLM 0.27.1: the tail).
    With caching on, blocks without a digest go to the head everywhere."""

    lone_request_uncut: bool = True
    """A request that is alone is not held to `long_prefill_token_threshold` (vLLM: from 0.31 on)."""

    fits_model_len_to_pool: bool = False
    """No request can outgrow the pool, because `max_model_len` is lowered to what the pool holds. vLLM does not start with
    a longer one, so its adapter asks for that; a request that would be refused elsewhere ends there by length."""

    late_requests: Literal["queue", "reject-unless-keep"] | None = None
    """The only policy for late requests that the engine has, whatever its configuration asks for. None: it has them all.
    vLLM queues; from 0.33 on it rejects under an `abort` or `wait` pause."""

    pauses_meet: Literal["merged", "apart"] = "merged"
    """How pause calls meet. Apart (vLLM): no call looks at what was before. One that finds nothing left to run completes at
    once, by itself. Each pending call completes by itself when the loop looks for work and finds none, the newest first, with its
    own clear_cache; another call may be taken up before it looks. None is superseded; `resume` leaves them pending."""

    ranks_agree: bool = False
    """The engine is one of several ranks that step together (vLLM with data parallel and a mixture of experts). A pause completes
    when every rank has it, at a look for work after nothing is left to run here: which one is known to the log alone. Until then
    `resume` is refused."""

    reset_preempts_frozen: bool = True
    """`reset_prefix_cache` under an effective pause takes the blocks of frozen requests. False (vLLM's default): it is refused."""

    weights_need_pause: bool = True
    """Weight sessions and labels want a paused engine, a pause that runs requests wants no session, and the parts of a session
    are counted. False (vLLM): a session minds only itself, so that labels and weights may change under running requests."""

    failed_update_stops: bool = True
    """A failure after a session's first byte closes the session and takes the engine out of service. False (vLLM): a failed
    update closes the session, a failed finish leaves it open, and either way half-new weights go on serving."""

    labels_at_landing: bool = False
    """A token is labelled with the version that is resident when its step lands (vLLM), not when it was launched: another one
    if the label was changed meanwhile, which only asynchronous scheduling leaves time for."""

    reports_spans: bool = True
    """A finished request reports which output tokens which version sampled (vLLM: from 0.32 on)."""

    @property
    def in_waves(self) -> Profile | None:
        """The profile of the same engine as a rank that steps together with others; None if none was checked against one."""
        return next((profile for profile in PROFILES if profile.name == f"{self.name}-waves"), None)

    @classmethod
    def named(cls, name: str) -> Profile:
        """The profile of that name.

        Raises:
            ValueError: there is none; the message lists the known names.
        """
        for profile in PROFILES:
            if profile.name == name:
                return profile
        known = ", ".join(profile.name for profile in PROFILES)
        raise ValueError(f"got profile {name!r}, expected one of: {known}")


CAESURA = Profile(name="caesura")
"""What contract.md promises: the profile of our own engine."""

VLLM_0_33 = Profile(
    name="vllm-0.33",
    empty_steps=True,
    wait_admits_waiting=False,
    fits_model_len_to_pool=True,
    late_requests="reject-unless-keep",
    pauses_meet="apart",
    reset_preempts_frozen=False,
    weights_need_pause=False,
    failed_update_stops=False,
    labels_at_landing=True,
)
VLLM_0_32 = replace(VLLM_0_33, name="vllm-0.32", late_requests="queue")
VLLM_0_32_WAVES = replace(VLLM_0_32, name="vllm-0.32-waves", ranks_agree=True)
VLLM_0_31 = replace(VLLM_0_32, name="vllm-0.31", reports_spans=False)
VLLM_0_30 = replace(VLLM_0_31, name="vllm-0.30", lone_request_uncut=False)
VLLM_0_29 = replace(VLLM_0_30, name="vllm-0.29")
VLLM_0_28 = replace(VLLM_0_29, name="vllm-0.28")
VLLM_0_27 = replace(VLLM_0_28, name="vllm-0.27", uncached_freed_to="tail")
VLLM_0_26 = replace(VLLM_0_27, name="vllm-0.26", uncached_freed_to="head")

PROFILES = (CAESURA, VLLM_0_26, VLLM_0_27, VLLM_0_28, VLLM_0_29, VLLM_0_30, VLLM_0_31, VLLM_0_32, VLLM_0_32_WAVES, VLLM_0_33)
"""Every profile that a log can name. vLLM's differ from version to version in what docs/vllm.md lists."""
