"""The guard of the page: ASGI layers that every request passes before it reaches Gradio.

From the outside in: headers that restrict what a browser runs, the page's own address, a password if there is one, and
limits of size, number and time."""

from __future__ import annotations

from outrider.app.page.guard.asgi import Application
from outrider.app.page.guard.content_policy import ContentPolicy
from outrider.app.page.guard.limits import Limits
from outrider.app.page.guard.password import Password
from outrider.app.page.guard.same_origin import LOOPBACK, SameOrigin


def guarded(limits: Limits, hosts: frozenset[str] = LOOPBACK, password: str | None = None) -> Application:
    """The application inside `limits` behind all layers."""
    inner: Application = limits if password is None else Password(limits, password)
    return ContentPolicy(SameOrigin(inner, hosts))
