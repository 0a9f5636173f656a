"""Every drafter and rule by name: the explicit tables that the code, the command line and the tests all read.

A new method is one function or class in a file of core/drafters or core/rules, and one row in the file of this folder
that has its family's name. The conformance suite then tests it.
"""

from __future__ import annotations

from outrider.core.methods.combined import AUTO
from outrider.core.methods.resolve import make_drafter, make_rule
from outrider.core.methods.row import Input, Method
from outrider.core.methods.tables import DRAFTERS, RULES

__all__ = ["AUTO", "DRAFTERS", "RULES", "Input", "Method", "make_drafter", "make_rule"]
