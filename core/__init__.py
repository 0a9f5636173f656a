"""One draft/verify core for every modality: it works on token ids and distributions, whatever a token means."""

import os
import sys

__version__ = "0.1.0"

# `outrider` is a namespace package, which has no __init__.py that could hold its version.
setattr(sys.modules["outrider"], "__version__", __version__)  # noqa: B010

# GNU OpenMP reads this once, when torch is imported. By default a thread that waits for others spins for milliseconds,
# and takes the processor from the one that it waits for wherever something else computes: decoding falls to a third of
# its speed or less.
SPINS = {"GOMP_SPINCOUNT": "20000"}
if "OMP_WAIT_POLICY" not in os.environ and os.environ.keys().isdisjoint(SPINS):
    os.environ.update(SPINS)
