"""What a request is called in a log, whatever its client called it."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from pydantic import TypeAdapter, ValidationError

from harness.operations import Handle

_HANDLE: TypeAdapter[str] = TypeAdapter(Handle)


@lru_cache(maxsize=65_536)
def handle(request_id: str) -> str:
    """A request id, any string, as logs can have it: what is no handle of a request keeps its beginning and gets a digest."""
    try:
        return _HANDLE.validate_python(request_id)
    except ValidationError:
        said = request_id.encode("utf-8", "surrogatepass")  # JSON can bring half a character
        return re.sub(r"[^A-Za-z0-9_.:-]", "_", request_id)[:40] + "-" + hashlib.sha256(said).hexdigest()[:16]
