"""Connections that clients end or abandon: what they hold is given back."""

import socket

import psutil
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live
from tests.server.test_disconnects import wait_until

from trunkline.server.config import HttpOptions, ServerConfig

ONE = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"text": "hi", "sampling_params": {"max_new_tokens": 2}}'
REQUESTS = {
    "nothing": b"",
    "half a head": b"POST /generate HTTP/1.1\r\nHo",
    "half a body": ONE + b"Content-Length: 1000\r\n\r\n{",
    "an answered request": ONE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    "a refused request": ONE + b"Content-Length: 2\r\n\r\n{}",
    "two answered requests": (ONE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY) * 2,
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
}


def held(live: Live) -> int:
    """How many connections the server still holds."""
    connections = psutil.Process().net_connections("tcp4")
    return sum(
        one.laddr.port == live.port and one.status != psutil.CONN_LISTEN for one in connections
    )


@pytest.mark.parametrize("half_close", [False, True])
@pytest.mark.parametrize("sent", REQUESTS)
def test_a_closed_connection_is_let_go_at_once(live: Live, sent: str, half_close: bool):
    before = held(live)
    clients = [socket.create_connection(("127.0.0.1", live.port), timeout=5) for _ in range(3)]
    for client in clients:
        client.sendall(REQUESTS[sent])
        if "request" in sent:
            assert client.recv(4096).startswith(b"HTTP/1.1")
    wait_until(lambda: held(live) == before + 3)
    for client in clients:
        if half_close:
            client.shutdown(socket.SHUT_WR)
        else:
            client.close()
    wait_until(lambda: held(live) <= before, 10)
    for client in clients:
        client.close()


def test_clients_that_stop_sending_are_given_up():
    http = HttpOptions(keep_alive_timeout_s=0.5)
    with Live(FakeEngine(delay_s=0.02), ServerConfig(http=http)) as live:
        silent = socket.create_connection(("127.0.0.1", live.port), timeout=5)
        silent.sendall(REQUESTS["half a body"])
        idle = socket.create_connection(("127.0.0.1", live.port), timeout=5)
        idle.sendall(REQUESTS["HTTP/2"])
        sampling = {"max_new_tokens": 60, "ignore_eos": True}  # they take longer than the time-out
        streamed = live.generate(text="x", stream=True, sampling_params=sampling).text
        whole = live.generate(text="x", sampling_params=sampling)
        assert streamed.endswith("data: [DONE]\n\n")
        assert whole.json()["meta_info"]["completion_tokens"] == 60
        assert silent.recv(4096).startswith(b"HTTP/1.1 499")
        assert silent.recv(4096) == b""
        silent.close()
        while idle.recv(4096):
            pass
        idle.close()
        wait_until(lambda: live.server.metrics.http_active == 0)


def test_leaving_in_the_middle_of_an_http2_body_ends_the_request(live: Live):
    before = held(live)
    client = H2Connection(H2Configuration(client_side=True))
    client.initiate_connection()
    head = {":method": "POST", ":path": "/generate", ":scheme": "http", ":authority": "x"}
    client.send_headers(1, [*head.items(), ("content-type", "application/json")])
    client.send_data(1, b"{")
    with socket.create_connection(("127.0.0.1", live.port), timeout=5) as connection:
        connection.sendall(client.data_to_send())
        wait_until(lambda: live.server.metrics.http_active == 1)
    wait_until(lambda: live.server.metrics.http_active == 0 and held(live) <= before)
