"""What the maps should hold, from policy and interfaces."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address
from typing import Any

from google.protobuf import json_format

from bpf.desired import Desired, Target, desired
from bpf.layout import MeshConfig, ServiceKey
from bpf.policy import Backend, check, combine
from xds.pb.bpf import policy_pb2

TARGET = Target(7, "rep0", bytes(6), bytes(6))


def of(node: str = "node-1", targets: dict[str, Target] | None = None, **values: Any) -> Desired:
    message = json_format.ParseDict(values, policy_pb2.NodePolicy())
    return desired(combine([check("a", message)], node), node, targets or {})


def service(port: int, *backends: tuple[str, str], **fields: Any) -> dict[str, Any]:
    listed = [{"address": address, "port": 9000, "weight": 1, "node": node} for address, node in backends]
    return {"name": f"s{port}", "address": "198.18.0.1", "port": port, "transport": "TCP", "backends": listed} | fields


def end(address: str, port: int = 9000) -> ServiceKey:
    return ServiceKey(ip_address(address), port, 6)


def test_targets_of_functions_that_the_policy_doesnt_have_are_left_out() -> None:
    made = of(targets={"0000:3b:00.2": TARGET, "0000:3b:00.3": TARGET}, functions=[{"pcie": "0000:3b:00.2"}])
    assert made.targets == {"0000:3b:00.2": TARGET}
    assert made.functions == {"0000:3b:00.2"}


def test_sockets_are_joined_with_backends_here_and_the_proxy() -> None:
    ends = (("10.0.0.1", "node-1"), ("10.0.0.2", "node-2"), ("10.0.0.3", ""), ("127.0.0.1", ""))
    services = [
        service(1, *ends, joinsSockets=True, nodeProxyWeight=3),
        service(2, ("10.0.0.4", "node-1")),
    ]
    made = of(services=services, nodeProxy={"address": "10.9.9.9", "port": 15001, "mark": 1, "mask": 1})
    assert made.join_endpoints == {end("10.0.0.1"), end("127.0.0.1"), end("10.9.9.9", 15001)}
    assert of(node="node-2", services=services[1:]).join_endpoints == frozenset()
    tables = {key.port: table for key, table in made.services.items()}
    assert tables[1].proxy == Backend(IPv4Address("10.9.9.9"), 15001, 3)
    assert tables[2].proxy is None
    assert made.config == MeshConfig(proxy_mark=1, proxy_mask=1)


def test_an_endpoint_that_two_tiers_share_has_none() -> None:
    made = of(
        services=[
            service(1, ("10.0.0.1", "node-1"), ("10.0.0.2", "node-1"), ("10.0.0.5", "node-2"), tier=1),
            service(2, ("10.0.0.2", "node-1"), ("10.0.0.3", "node-1"), tier=2),
            service(3, ("10.0.0.4", "node-1")),
        ]
    )
    assert made.tier_addresses == {end("10.0.0.1"): 1, end("10.0.0.3"): 2}
    assert {key.port: table.tier for key, table in made.services.items()} == {1: 1, 2: 2, 3: 0}
