"""Where the page listens, by which names it is reached, and its password. Independent of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.app.page.guard.same_origin import LOOPBACK
from outrider.core.errors import InvalidOption

_EVERY = ("0.0.0.0", "::")  # every address of the machine
_SHORTEST = 8  # characters of a password


@dataclass(frozen=True)
class Access:
    """The address to listen on, the names that requests may use for it, and the password; checked when it is made."""

    host: str = "127.0.0.1"
    allowed_hosts: Sequence[str] = ()
    password: str | None = None

    def __post_init__(self) -> None:
        for name in (self.host, *self.allowed_hosts):
            if not name or any(sign in name for sign in "/@[] *?#"):
                raise InvalidOption(
                    f"{name!r} is not a host; give a name or an address such as 192.168.1.5, without a port"
                )
        if self.password is not None and len(self.password) < _SHORTEST:
            raise InvalidOption(f"the password has {len(self.password)} characters; choose one of {_SHORTEST} or more")
        if self.host in LOOPBACK:
            return
        if self.password is None:
            raise InvalidOption(
                f"a page on {self.host} is within reach of other machines, so it needs a password: set "
                "OUTRIDER_PASSWORD or give --password"
            )
        if self.host in _EVERY and not self.allowed_hosts:
            raise InvalidOption(
                f"{self.host} stands for every address of this machine; name those by which the page is reached, such "
                "as --allowed-host 192.168.1.5"
            )

    @property
    def hosts(self) -> frozenset[str]:
        """The names of the page in lower case."""
        own = () if self.host in _EVERY else (self.host,)
        return LOOPBACK | {name.lower() for name in (*own, *self.allowed_hosts)}


LOCAL = Access()
