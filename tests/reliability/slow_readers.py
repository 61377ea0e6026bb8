"""A program of clients that all ask for a stream at once, and read one byte of it per second.

    python -m tests.reliability.slow_readers URL NUM_READERS < BODY

It prints `asked` when every request is sent, and reads slowly until its input ends. Then it reads the rest, and prints
how many streams were complete. It is not in the measuring process, because a thousand reads a second delay a clock.
"""

from __future__ import annotations

import select
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from urllib.parse import urlsplit

RECEIVE_BYTES = 4_096
"""Size of a reader's kernel buffer. The server holds bytes beyond it."""
PARTS = 20
"""Number of parts of a second. The clients read in turn in these parts, because reading at once would be a burst."""
WHOLE = b"data: [DONE]\n\n\r\n0"
_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n"
)


def ask(url: str, body: bytes) -> socket.socket:
    address = urlsplit(url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    client.settimeout(60)
    client.connect((address.hostname, address.port))
    client.sendall(_HEAD % len(body) + body)
    return client


def trickle(clients: list[socket.socket]) -> None:
    """Waits until the input ends."""
    for part in cycle(range(PARTS)):
        if select.select([sys.stdin], [], [], 1.0 / PARTS)[0]:
            return
        for client in clients[part::PARTS]:
            client.recv(1)


def is_whole(client: socket.socket) -> bool:
    return b"".join(iter(partial(client.recv, 65536), b"")).rstrip().endswith(WHOLE)


def main() -> None:
    url, num_readers = sys.argv[1], int(sys.argv[2])
    body = sys.stdin.buffer.readline()
    clients = [ask(url, body) for _ in range(num_readers)]
    print("asked", flush=True)
    trickle(clients)
    with ThreadPoolExecutor(64) as threads:
        print(sum(threads.map(is_whole, clients)))


if __name__ == "__main__":
    main()
