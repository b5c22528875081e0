"""Caesura's tool: scenarios, the model of an engine, adapters to real ones, and the verdicts."""
