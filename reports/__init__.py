"""Renders what happened, for people. Reads logs and verdicts; decides nothing."""
