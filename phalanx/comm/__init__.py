"""Process groups and communication between ranks. Importing this registers the backend "phalanx" of torch.distributed,
and so imports torch: the only package whose import has an effect."""

from phalanx.comm.backend import register

register()
