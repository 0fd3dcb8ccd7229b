from phalanx.core import renamed

__getattr__ = renamed.old_names(__name__)
