"""Whether a port is free, asked before anything is loaded."""

from __future__ import annotations

import socket

from outrider.core.errors import InvalidOption


def check_port(host: str, port: int | None) -> None:
    """Refuse a port that another program listens on, before anything is loaded."""
    if port is None:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((host, port))
        except OSError as error:
            raise InvalidOption(
                f"can't listen on port {port} of {host}: {error.strerror or error}; give another --port, or none for "
                "the first free one"
            ) from None
