"""HTTP of a real server: health that means it, metrics, status."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conversation import attach, names
from kvledger.client import Client
from kvledger.protocol import Chain, Commit, Match, Report, Reserve, Settled
from kvledger.server.http_connection import MAX_CONNECTIONS, PATIENCE_SECONDS
from kvledger.server.http_thread import HttpThread
from kvledger.server.status import StatusDocument
from servers import RunningServer, StartServer, wait_until


def get(running: RunningServer, path: str, seconds: float = 10) -> tuple[int, bytes]:
    address = urllib.parse.urlparse(running.http)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=seconds)
    connection.request("GET", path)
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def metrics(running: RunningServer) -> dict[tuple[str, str], float]:
    """Samples by name and the value of their only label, if any."""
    status, text = get(running, "/metrics")
    assert status == 200
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


@pytest.fixture
def running(server: StartServer) -> RunningServer:
    return server(http="127.0.0.1:0")


def test_healthy(running: RunningServer) -> None:
    status, body = get(running, "/healthz")
    assert status == 200
    assert json.loads(body)["healthy"] is True
    assert get(running, "/nowhere")[0] == 404


def test_status_is_the_same_document(running: RunningServer) -> None:
    status, body = get(running, "/api/v1/status")
    assert status == 200
    over_http = json.loads(body)
    with Client(running.socket_path) as client:
        over_socket = client.status()
    for document in (over_http, over_socket):
        del document["server"]["uptime_seconds"], document["server"]["sessions"]
        del document["memory"]["pages_ready"], document["memory"]["growth"]
    assert over_http == over_socket
    assert over_http["server"]["http"] == running.http


def test_metrics_count_what_happened(running: RunningServer) -> None:
    wait_until(lambda: metrics(running)["kvledger_growth_state", "complete"] == 1)
    scheduler, (worker,) = attach(running.socket_path)
    chain = Chain(parent=b"", names=names("a", 3))
    reserved = scheduler.ask(Reserve, step=1, group=0, chains=[chain])
    worker.ask(Commit, reservations=reserved.chains[0].reservations)
    scheduler.wait_push(Settled)
    scheduler.ask(Match, lease=1, group=0, names=names("a", 5))
    orphan = Chain(parent=names("none", 1), names=names("b", 1))
    scheduler.ask(Reserve, step=1, group=0, chains=[orphan])
    found = metrics(running)
    with Client(running.socket_path) as client:
        (namespace,) = client.status()["namespaces"]
    expected = {
        ("kvledger_objects", ""): 3,
        ("kvledger_used_bytes", ""): 3 * 4096,
        ("kvledger_namespace_objects", namespace["id"]): 3,
        ("kvledger_leases", ""): 1,
        ("kvledger_lookups_total", ""): 1,
        ("kvledger_hit_chunks_total", ""): 3,
        ("kvledger_missed_chunks_total", ""): 2,
        ("kvledger_stored_total", ""): 3,
        ("kvledger_refused_total", "parent_missing"): 1,
        ("kvledger_engines_open", ""): 1,
        ("kvledger_memory_limit_bytes", ""): 64 << 20,
    }
    assert expected == {key: found.get(key) for key in expected}


def test_unbalanced_accounts_are_shown_only_once_somebody_reports(running: RunningServer) -> None:
    assert ("kvledger_unbalanced_accounts_total", "") not in metrics(running)
    scheduler, workers = attach(running.socket_path)
    scheduler.ask(
        Report,
        request="r",
        tokens=64,
        chunk_tokens=16,
        local_tokens=0,
        external_tokens=0,
        miss="never_seen",
        fates=[("stored", 4)],
        dropped={},
        imbalance="",
    )
    found = metrics(running)
    assert found["kvledger_unbalanced_accounts_total", ""] == 0
    assert found["kvledger_chunk_fates_total", "stored"] == 4
    assert workers


def address_of(running: RunningServer) -> tuple[str, int]:
    address = urllib.parse.urlparse(running.http)
    assert address.hostname is not None
    assert address.port is not None
    return address.hostname, address.port


def files_of(running: RunningServer) -> int:
    return len(os.listdir(f"/proc/{running.process.pid}/fd"))


def test_idle_peers_keep_neither_health_nor_engines_out(running: RunningServer) -> None:
    assert get(running, "/healthz")[0] == 200
    before = files_of(running)
    idle = []
    for number in range(700):
        peer = socket.create_connection(address_of(running), timeout=10)
        if number % 2:
            peer.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n")
        idle.append(peer)
    wait_until(lambda: files_of(running) <= before + MAX_CONNECTIONS)
    assert get(running, "/healthz")[0] == 200
    assert attach(running.socket_path)
    begin = time.monotonic()
    wait_until(lambda: files_of(running) <= before + 4, 10 * PATIENCE_SECONDS)
    assert time.monotonic() - begin < 10 * PATIENCE_SECONDS
    for peer in idle:
        peer.close()
    assert "Traceback" not in running.log()


def test_who_does_not_read_is_closed(running: RunningServer) -> None:
    assert get(running, "/healthz")[0] == 200
    before = files_of(running)
    peers = []
    for _ in range(4):
        peer = socket.create_connection(address_of(running), timeout=10)
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2000)
        peers.append(peer)
    wait_until(lambda: files_of(running) >= before + 4)
    wait_until(lambda: files_of(running) <= before, 10 * PATIENCE_SECONDS)
    assert get(running, "/healthz")[0] == 200
    for peer in peers:
        peer.close()
    assert "Traceback" not in running.log()


def test_a_patient_peer_may_ask_again_and_again(running: RunningServer) -> None:
    connection = http.client.HTTPConnection(*address_of(running), timeout=10)
    for _ in range(300):
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
    connection.close()


@pytest.fixture
def borrowed_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop on a thread, standing in for the server's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_health_asks_the_loop_and_the_arena(
    running: RunningServer, borrowed_loop: asyncio.AbstractEventLoop
) -> None:
    with Client(running.socket_path) as client:
        document = msgspec.convert(client.status(), StatusDocument)
    intact = [True]
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    stand_in = replace(running, ready_line=f"x, http://127.0.0.1:{port}")
    http_thread = HttpThread(listener, borrowed_loop, lambda: document, lambda: intact[0])
    http_thread.start()
    assert get(stand_in, "/healthz")[0] == 200
    intact[0] = False
    status, body = get(stand_in, "/healthz")
    assert (status, "seals" in json.loads(body)["reason"]) == (503, True)
    intact[0] = True
    go_on = threading.Event()
    borrowed_loop.call_soon_threadsafe(go_on.wait)
    status, body = get(stand_in, "/healthz")
    assert (status, "no answer" in json.loads(body)["reason"]) == (503, True)
    go_on.set()
    assert get(stand_in, "/healthz")[0] == 200
    http_thread.stop()


def test_draining_is_not_healthy(running: RunningServer) -> None:
    scheduler, (worker,) = attach(running.socket_path)
    chain = Chain(parent=b"", names=names("a", 1))
    wait_until(
        lambda: bool(scheduler.ask(Reserve, step=1, group=0, chains=[chain]).chains[0].reservations)
    )
    assert get(running, "/healthz")[0] == 200
    running.process.terminate()
    wait_until(lambda: not os.path.exists(running.socket_path))
    status, body = get(running, "/healthz")
    assert status == 503
    assert "shutting down" in json.loads(body)["reason"]
    assert worker
