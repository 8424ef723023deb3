"""Ask the service in this container whether it is ready: the HEALTHCHECK of the images, which have no curl.

    python -I -S healthcheck.py [PORT]

Without a port it asks whichever of the four services listens here. Exit code 0 says ready; on 1, the answer (which
names what is missing) is printed, for `docker inspect`. Sockets alone: this runs every few seconds.
"""

import socket
import sys
from collections.abc import Sequence

PORTS = (8000, 9101, 9102, 9103)
"""Of the api, tokenizer, scheduler and detokenizer, as the images leave them."""
TIMEOUT_S = 2.5


def ask(port: int) -> tuple[bool, str]:
    """Give whether the service on a port is ready, and what it said.

    Raises:
        OSError: nobody listens, or no answer comes.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"GET /readyz HTTP/1.0\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        answer = b""
        while chunk := connection.recv(4096):
            answer += chunk
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b" ")[1:2] == [b"200"], body.decode("utf-8", "replace").strip()


def main(argv: Sequence[str]) -> int:
    """Ask the first port that somebody listens on."""
    for port in [int(argv[1])] if len(argv) > 1 else PORTS:
        try:
            ready, said = ask(port)
        except ConnectionRefusedError:
            continue
        except OSError as e:
            ready, said = False, f"port {port}: {e}"
        sys.stdout.write(said + "\n")
        return 0 if ready else 1
    sys.stdout.write("nobody listens yet\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
