"""The control plane of data-parallel ranks: a model of its own, small enough to try every order of events."""
