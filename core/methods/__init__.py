"""Tables of all drafters and rules by name, read by the library, the command line, the demo page and the tests.

To add a method, write a class or function in core/drafters or core/rules and a row in its family's file of this folder.
The conformance suite then tests it.
"""

from __future__ import annotations

from outrider.core.methods.combined import AUTO
from outrider.core.methods.resolve import make_drafter, make_rule
from outrider.core.methods.row import Input, Method
from outrider.core.methods.tables import DRAFTERS, RULES

__all__ = ["AUTO", "DRAFTERS", "RULES", "Input", "Method", "make_drafter", "make_rule"]
