"""Phalanx trains large models on the GPUs you really have, with one loss curve. Importing this imports no torch."""

__version__ = "0.1.0"
