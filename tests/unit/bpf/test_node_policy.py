"""A NodePolicy that can't be used is refused with a reason; what can is made ready."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import Any

import pytest
from google.protobuf import json_format

from bpf.layout import ANY, GpuFlowKey, GpuQpKey, ServiceKey
from bpf.node_errors import NodePolicyError
from bpf.policy import LOOPBACK, Backend, Fragment, Policy, Proxy, check, combine, parse
from xds.pb.bpf import policy_pb2

PCIE = "0000:3b:00.2"


def message(values: dict[str, Any]) -> policy_pb2.NodePolicy:
    return json_format.ParseDict(values, policy_pb2.NodePolicy())


def fragment(name: str = "a", **values: Any) -> Fragment:
    return check(name, message(values))


def policy(*fragments: Fragment, node: str = "node-1") -> Policy:
    return combine(fragments, node)


def service(**fields: Any) -> dict[str, Any]:
    return {
        "name": "s",
        "address": "198.18.0.1",
        "port": 80,
        "transport": "TCP",
        "backends": [{"address": "10.0.0.1", "port": 9000, "weight": 1}],
    } | fields


def test_everything_that_a_policy_can_say() -> None:
    made = policy(
        fragment(
            functions=[{"pcie": "0000:3B:00.2", "mac": "02:00:00:00:00:0A"}],
            queuePairs=[
                {"queuePair": 17, "function": PCIE},
                {"address": "10.0.0.9", "queuePair": 18, "function": PCIE},
            ],
            flows=[{"address": "fd00::1", "port": 80, "protocol": 6, "function": PCIE}],
            services=[
                service(
                    tier=3,
                    nodeProxyWeight=2,
                    joinsSockets=True,
                    backends=[
                        {"address": "10.0.0.2", "port": 9000, "weight": 5, "node": "node-2"},
                        {"address": "10.0.0.1", "port": 9000, "weight": 1, "node": "node-1"},
                        {"address": "10.0.0.3", "port": 9000, "node": "node-1"},
                        {"address": "127.0.0.1", "port": 9000, "weight": 1},
                    ],
                )
            ],
            ownedRanges=["198.18.0.0/16"],
            tierMarks=[{"mark": 7, "tier": 3}],
            nodeProxy={"address": "10.0.0.4", "port": 15001, "mark": 256, "mask": 256},
        )
    )
    assert made.functions[PCIE].mac == bytes.fromhex("02000000000a")
    assert dict(made.queue_pairs) == {GpuQpKey(ANY, 17): PCIE, GpuQpKey(IPv4Address("10.0.0.9"), 18): PCIE}
    assert dict(made.flows) == {GpuFlowKey(IPv6Address("fd00::1"), 80, 6): PCIE}
    (only,) = made.services.values()
    assert only.backends == (
        Backend(IPv4Address("10.0.0.1"), 9000, 1),
        Backend(IPv4Address("10.0.0.2"), 9000, 5),
        Backend(IPv4Address("127.0.0.1"), 9000, 1),
    )
    assert {where: [str(item.address) for item in found] for where, found in only.endpoints.items()} == {
        "node-1": ["10.0.0.1", "10.0.0.3"],
        "node-2": ["10.0.0.2"],
        LOOPBACK: ["127.0.0.1"],
    }
    assert made.owned_ranges == {ip_network("198.18.0.0/16")}
    assert dict(made.tier_marks) == {7: 3}
    assert made.proxy == Proxy(IPv4Address("10.0.0.4"), 15001, 256, 256)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"functions": [{"pcie": "3b:00.2"}]}, "no PCIe address"),
        ({"functions": [{"pcie": PCIE}, {"pcie": PCIE.upper()}]}, "occurs twice"),
        ({"functions": [{"pcie": PCIE, "mac": "01:00:5e:00:00:01"}]}, "MAC"),
        ({"functions": [{"pcie": PCIE, "mac": "00:00:00:00:00:00"}]}, "MAC"),
        ({"queuePairs": [{"function": PCIE}]}, "queue pair 0"),
        ({"queuePairs": [{"queuePair": 1 << 24, "function": PCIE}]}, "16777215"),
        ({"flows": [{"function": PCIE}]}, "no IP address"),
        ({"flows": [{"address": "10.0.0.1", "port": 80, "function": PCIE}]}, "needs protocol 6"),
        ({"flows": [{"address": "10.0.0.1", "port": 80, "protocol": 1, "function": PCIE}]}, "needs protocol 6"),
        ({"flows": [{"address": "10.0.0.1", "protocol": 256, "function": PCIE}]}, "too large"),
        ({"flows": [{"address": "224.0.0.1", "function": PCIE}]}, "one host"),
        ({"services": [service(name="")]}, "no name"),
        ({"services": [service(transport="TRANSPORT_UNSPECIFIED")]}, "no transport"),
        ({"services": [service(tier=16)]}, "above 15"),
        ({"services": [service(port=0)]}, "port 0"),
        ({"services": [service(port=65536)]}, "port 65536"),
        ({"services": [service(address="::ffff:10.0.0.1")]}, "write IPv4"),
        ({"services": [service(address="fe80::1%eth0")]}, "no scope"),
        ({"services": [service(transport="UDP", joinsSockets=True)]}, "only TCP"),
        ({"services": [service(), service(name="t")]}, "occurs twice"),
        ({"services": [service(backends=[{"address": "fd00::1", "port": 1, "weight": 1}])]}, "IPv4 socket"),
        ({"services": [service(backends=[{"address": "198.18.0.1", "port": 80, "weight": 1}])]}, "its own backend"),
        ({"services": [service(backends=[{"address": "10.0.0.1", "port": 1}] * 2)]}, "twice"),
        ({"services": [service(backends=[{"address": "10.0.0.1", "port": 1, "node": LOOPBACK}])]}, "no node's id"),
        ({"ownedRanges": ["198.18.0.1/16"]}, "host bits"),
        ({"ownedRanges": ["10.0.0.0/7"]}, "wider"),
        ({"ownedRanges": ["127.0.0.0/8"]}, "every node needs"),
        ({"ownedRanges": ["fe80::/64"]}, "every node needs"),
        ({"tierMarks": [{"mark": 1}]}, "tier from 1"),
        ({"tierMarks": [{"tier": 1}]}, "needs a mark"),
        ({"tierMarks": [{"mark": 1, "tier": 1}, {"mark": 1, "tier": 2}]}, "occurs twice"),
        ({"nodeProxy": {"mark": 3, "mask": 1}}, "outside its mask"),
        ({"nodeProxy": {"mask": 1}}, "every socket"),
        ({"nodeProxy": {"address": "10.0.0.1"}}, "port 0"),
    ],
)
def test_what_is_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(NodePolicyError, match=why) as refused:
        fragment("bad", **values)
    assert "'bad'" in str(refused.value)


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        ({"functions": [{"pcie": PCIE}]}, {"functions": [{"pcie": PCIE}]}, "'a' and 'b' both have function"),
        ({"services": [service()]}, {"services": [service(name="t")]}, "both have service address"),
        ({"tierMarks": [{"mark": 1, "tier": 1}]}, {"tierMarks": [{"mark": 1, "tier": 1}]}, "both have tier mark"),
        ({"nodeProxy": {}}, {"nodeProxy": {}}, "both have a node proxy"),
        ({"ownedRanges": ["10.0.0.0/16"]}, {"services": [service()]}, "covers 10.0.0.1, which policy 'b'"),
        ({"services": [service(nodeProxyWeight=1)]}, {"nodeProxy": {"mark": 1, "mask": 1}}, "there is none"),
        ({"queuePairs": [{"queuePair": 1, "function": PCIE}]}, {"node": "other", "functions": [{"pcie": PCIE}]}, PCIE),
    ],
)
def test_what_contradicts(first: dict[str, Any], second: dict[str, Any], why: str) -> None:
    fragments = [fragment("b", **second), fragment("a", **first)]
    with pytest.raises(NodePolicyError, match=why):
        combine(fragments, "node-1")


def test_a_range_may_lie_beside_what_traffic_goes_to() -> None:
    around = [{"address": address, "port": 1, "weight": 1} for address in ("10.0.255.255", "10.2.0.0")]
    policy(fragment(ownedRanges=["10.1.0.0/16"], services=[service(backends=around)]))


def test_a_node_takes_its_own_fragments_and_those_for_all() -> None:
    mine = fragment("a", node="node-1", functions=[{"pcie": PCIE}])
    others = fragment("b", node="node-2", functions=[{"pcie": PCIE}], services=[service()])
    everybodys = fragment("c", services=[service()])
    made = combine([mine, others, everybodys], "node-1")
    assert set(made.functions) == {PCIE}
    assert set(made.services) == {ServiceKey(IPv4Address("198.18.0.1"), 80, 6)}


def test_garbage_is_no_policy() -> None:
    with pytest.raises(NodePolicyError, match="is no NodePolicy message"):
        parse("x", b"\xff\xff")
