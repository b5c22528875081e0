"""Looks for failures: random cases from one generator, judged, shrunk, and kept as scenario files.

`generate` makes a case, `run_case` puts an engine to it, `shrink` cuts a failing one down, and a
`Campaign` does so for many seeds on many processes. docs/fuzzing.md is the page for users.
"""

from __future__ import annotations
