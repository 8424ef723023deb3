"""Requests over a bare socket, for what no client library would do."""

import json
import socket

from tests.e2e.stack import Json, Stack


def connect(stack: Stack, body: Json, *, receive_buffer: int = 0, path: str = "/v1/completions") -> socket.socket:
    """Send a request to the first api; the answer is the caller's to read, and the socket to close."""
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", stack.ports()["api-0"]))
    sock.sendall(encode(body, path))
    return sock


def encode(body: Json, path: str = "/v1/completions") -> bytes:
    """Write a request as it goes over the wire."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def read_events(sock: socket.socket, count: int) -> bytes:
    """Read until so many events of a stream are there."""
    raw = b""
    while raw.count(b"data: ") < count:
        part = sock.recv(65536)
        assert part, raw[-2000:]
        raw += part
    return raw
