"""Ports that are chosen here and served by another process a while later."""

import socket


def claim_port(host: str, port: int = 0) -> socket.socket:
    """A socket bound to `port` (0: a free one), as its `getsockname()` says; while it is open,
    nobody gets that port by asking for a free one or by connecting to somewhere.

    A process that sets SO_REUSEADDR, as asyncio's servers and torch's TCPStore do, can serve on it:
    Linux lets several such sockets be bound to a port of which one listens.

    Raises:
        OSError: the port is taken, or the host is not of this machine.
    """
    claim = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        claim.bind((host, port))
    except OSError:
        claim.close()
        raise
    return claim
