"""The one error that users see as a sentence."""

from __future__ import annotations


class BadInput(ValueError):
    """Something that was given cannot be used: a file, a name, a folder, a setting.

    The message says what was got, what was expected and what to do; the command line prints it and exits with 64.
    """
