"""What a server is told when it starts, checked where it is written down."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How an engine is served over HTTP.

    Raises:
        ValueError: a control plane that anyone on the network could use.
    """

    served_model_name: str
    """What `/v1/models` lists; a request that names another model is refused."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    dev_mode: bool = False
    """Whether the control plane is there: pause, resume, weights, sleep. Whoever reaches it may stop the engine and replace its weights."""
    api_key: str | None = None
    """What `Authorization: Bearer` must carry on the control plane and on /v1; /health and /metrics stay open."""
    max_body_bytes: int = 4 << 20
    """A longer body is refused (413) before it is read."""
    drain_s: float = 5.0
    """How long a server that was told to stop lets requests run before it aborts them."""

    def __post_init__(self) -> None:
        if self.dev_mode and self.api_key is None and not is_loopback(self.host):
            raise ValueError(
                f"{self.host} is reachable from other machines, and the control plane pauses the engine and replaces its weights: "
                "set an API key, or serve on 127.0.0.1, or without dev mode"
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; of names, `localhost` alone is trusted to be so."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
