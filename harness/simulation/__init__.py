"""The model in virtual time: a workload's rollouts, an engine whose steps cost time, and a trainer that updates its weights.

What it says is a log like any other, so that every invariant is judged on it; how a workload fares under a
pause mode, a cache policy or an update interval is read from that log (figures.py).
"""
