"""Tells systemd that the server is ready, stops, and is alive: the protocol of sd_notify(3), for units of Type=notify.

Every message is one datagram to the socket that NOTIFY_SOCKET names. Without that variable nothing is sent. A message
that cannot be sent is logged, and the server goes on: systemd's own time limits then decide.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping

logger = logging.getLogger("inferd")


class Systemd:
    """systemd, as the manager of this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        name = environment.get("NOTIFY_SOCKET", "")
        self._address = f"\0{name[1:]}" if name.startswith("@") else name  # "@" begins an abstract address
        pid = environment.get("WATCHDOG_PID", str(os.getpid()))
        limit_us = environment.get("WATCHDOG_USEC", "0") if pid == str(os.getpid()) else "0"
        self._watchdog_s = int(limit_us) / 1e6 if limit_us.isdecimal() else 0.0
        """Seconds without WATCHDOG=1 after which systemd ends the service; 0 if it does not watch this process."""

    def tell(self, state: str) -> None:
        """Send one message, such as READY=1, without waiting."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(state.encode(), self._address)
        except OSError as error:
            logger.warning("systemd was not told %s: %s (NOTIFY_SOCKET)", state, error.strerror or error)

    async def keep_alive(self) -> None:
        """Tell systemd twice in its limit that the event loop runs. Returns at once if systemd does not watch."""
        while self._address and self._watchdog_s:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / 2)
