"""Launching runs. Importing this imports no torch; it knows where a function of version 0.1 is now."""

from phalanx.core import renamed

__getattr__ = renamed.old_names(__name__)
