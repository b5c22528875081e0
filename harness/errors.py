"""The one error that users see as a sentence, and the exit codes that are no verdict."""

from __future__ import annotations

USAGE, INTERRUPTED = 64, 130


class BadInput(ValueError):
    """Something that was given cannot be used: a file, a name, a folder, a setting.

    The message says what was got, what was expected and what to do; the command line prints it and exits with 64.
    """
