"""One draft/verify core for every modality: it works on token ids and distributions, whatever a token means."""

import sys

__version__ = "0.1.0"

# `outrider` is a namespace package, which has no __init__.py that could hold its version.
setattr(sys.modules["outrider"], "__version__", __version__)  # noqa: B010
