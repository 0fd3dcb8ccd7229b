"""Groups of ranks and what they send each other. Importing this makes the backend "phalanx" known to torch.distributed,
and so imports torch: the one package whose import has an effect, since a backend is nothing but a name to be found."""

from phalanx.comm.backend import register

register()
