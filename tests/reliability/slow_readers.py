"""Clients that ask for a stream each, all at once, and read a byte of it a second: a program of its own.

    python -m tests.reliability.slow_readers URL NUM_READERS < BODY

Says `asked` when every request has been sent. Reads on until its input ends; then it reads all that is left, and says
how many streams were whole. In the process that measures, a thousand reads a second would make its clock wait.
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
"""Of a reader's kernel buffer: what it does not read, the server holds."""
PARTS = 20
"""Of a second, in which as many clients each read their byte: a burst of reads would be the readers' own doing."""
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
    """Until the input ends."""
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
