"""A verdict from outside: a running server is put to the promises of docs/semantics.md over plain HTTP.

Needs httpx, which the extra `check` brings. docs/check.md is the user's page.
"""
