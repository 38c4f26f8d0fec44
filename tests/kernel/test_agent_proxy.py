"""A real gRPC service behind a service address, and a real Envoy as node proxy before it, over joined sockets."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bpf.layout import BackendStats, JoinEvent, SlotKey
from bpf.layout import Counter as Packets
from controlplane.envoy_binary import find_envoy
from tests.kernel.agents import Node, make_node, until
from tests.kernel.lab import Lab, Tell

pytestmark = pytest.mark.kernel

VIP, BACKEND, PROXY = "198.18.0.10", "10.51.0.1", "10.51.0.9"
PORT, BACKEND_PORT, PROXY_PORT = 80, 9100, 15001
METHOD = "/test.Echo/Stream"


@pytest.fixture
def node(lab: Lab) -> Node:
    made = make_node(lab)
    for address in (BACKEND, PROXY):
        lab.address(made.netns, "lo", f"{address}/32")
    return made


def policy(*, proxied: bool) -> dict[str, Any]:
    backend = {"address": BACKEND, "port": BACKEND_PORT, "weight": 0 if proxied else 1, "node": "node-1"}
    service = {
        "name": "echo",
        "address": VIP,
        "port": PORT,
        "transport": "TCP",
        "joinsSockets": True,
        "backends": [backend],
        "nodeProxyWeight": int(proxied),
    }
    return {
        "services": [service],
        "ownedRanges": ["198.18.0.0/16"],
        "nodeProxy": {"address": PROXY, "port": PROXY_PORT},
    }


# ---- children


def serve(tell: Tell) -> None:
    """A gRPC service that sends every message back."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    def answer(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from requests

    handler = grpc.method_handlers_generic_handler(
        "test.Echo", {"Stream": grpc.stream_stream_rpc_method_handler(answer)}
    )
    server = grpc.server(ThreadPoolExecutor(4), handlers=[handler])
    assert server.add_insecure_port(f"{BACKEND}:{BACKEND_PORT}")
    server.start()
    tell("ready")
    time.sleep(100)


def call(tell: Tell, calls: int) -> list[str]:
    """Streams of messages from one byte to a megabyte; returns what is wrong."""
    import grpc

    wrong = []
    sizes = (1, 100, 10_000, 1_000_000, 3)
    with grpc.insecure_channel(f"{VIP}:{PORT}") as channel:
        stream = channel.stream_stream(METHOD)
        for number in range(calls):
            sent = [hashlib.sha256(b"%d %d" % (number, size)).digest() * (size // 32 + 1) for size in sizes]
            received = list(stream(iter(sent), timeout=20))
            if received != sent:
                wrong.append(f"call {number}")
    return wrong


def joined(node: Node) -> int:
    return int(node.total("join_stats", JoinEvent.REDIRECTED, Packets).packets)


def start(node: Node, *, proxied: bool) -> None:
    node.write_policy(policy(proxied=proxied))
    node.start().hear("joined sockets behave")
    until((node.pins / "links" / "sock_join_established").exists, "the hook")
    node.lab.start(serve, netns=node.netns, cgroup=node.cgroup).hear()


def test_grpc_over_joined_sockets(node: Node) -> None:
    start(node, proxied=False)
    assert node.lab.start(call, 20, netns=node.netns, cgroup=node.cgroup).result() == []
    assert joined(node) > 100


def test_grpc_through_an_envoy_over_joined_sockets(node: Node) -> None:
    """Client to Envoy and Envoy to service: both connections are joined."""
    start(node, proxied=True)
    ready = node.lab.folder / "envoy.log"
    config = node.lab.folder / "envoy.json"
    config.write_text(json.dumps(_bootstrap()))
    with ready.open("wb") as log:
        envoy = subprocess.Popen(
            [
                *("nsenter", f"--net=/run/netns/{node.netns}"),
                *("sh", "-c", f'echo $$ > {node.cgroup}/cgroup.procs; exec "$@"', "sh"),
                *(str(find_envoy(None)), "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        until(lambda: "starting main dispatch loop" in ready.read_text(), "Envoy")
        assert node.lab.start(call, 20, netns=node.netns, cgroup=node.cgroup).result() == []
    finally:
        envoy.kill()
        envoy.wait(10)
    assert joined(node) > 200
    assert node.total("join_stats", JoinEvent.ADDED, Packets).packets == 4
    (row,) = node.map("backend_slots")
    assert SlotKey.unpack(row).index == 0
    assert [stats.connections for stats in _backend_stats(node)] == [1]


def _backend_stats(node: Node) -> list[BackendStats]:
    from bpf import loader
    from bpf.maps import Map

    opened = Map.open(loader.maps_directory(node.pins) / "backend_stats")
    try:
        return list(opened.totals(BackendStats).values())
    finally:
        opened.close()


def _bootstrap() -> dict[str, Any]:
    def address(host: str, port: int) -> dict[str, Any]:
        return {"socket_address": {"address": host, "port_value": port}}

    proxy = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": "node",
        "cluster": "echo",
    }
    endpoint = {"endpoint": {"address": address(BACKEND, BACKEND_PORT)}}
    return {
        "static_resources": {
            "listeners": [
                {
                    "name": "node",
                    "address": address(PROXY, PROXY_PORT),
                    "filter_chains": [{"filters": [{"name": "envoy.tcp_proxy", "typed_config": proxy}]}],
                }
            ],
            "clusters": [
                {
                    "name": "echo",
                    "type": "STATIC",
                    "load_assignment": {"cluster_name": "echo", "endpoints": [{"lb_endpoints": [endpoint]}]},
                }
            ],
        }
    }
