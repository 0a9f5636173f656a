"""A page that other machines reach has a password, and answers to names that were given."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.app.page.guard.access import LOCAL, Access
from outrider.core.errors import InvalidOption


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"host": "192.168.1.5"}, "needs a password"),
        ({"host": "0.0.0.0", "password": "long enough"}, "--allowed-host"),
        ({"host": "::", "password": "long enough"}, "--allowed-host"),
        ({"password": "short"}, "5 characters"),
        ({"password": ""}, "0 characters"),
        ({"host": "http://here"}, "is not a host"),
        ({"allowed_hosts": ("*",)}, "is not a host"),
        ({"allowed_hosts": ("",)}, "is not a host"),
    ],
)
def test_unsafe_access_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        Access(**given)


def test_the_names_of_the_page() -> None:
    loopback = {"127.0.0.1", "localhost", "::1"}
    assert LOCAL.hosts == loopback
    given = {"allowed_hosts": ("Box.local",), "password": "long enough"}
    assert Access("192.168.1.5", **given).hosts == {*loopback, "192.168.1.5", "box.local"}
    assert Access("0.0.0.0", **given).hosts == {*loopback, "box.local"}
