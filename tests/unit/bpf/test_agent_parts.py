"""The agent's small parts: interfaces, the kernel's messages, stored policies, changes carried out, the unit."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from google.protobuf import json_format
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from bpf import install, netlink, policy_file, service_manager
from bpf.apply import carry_out
from bpf.datapath import Datapath
from bpf.errors import BpfError, MapFullError
from bpf.interfaces import Interface, InterfaceTable
from bpf.node_errors import InstallError, NodePolicyError, PolicyFileError
from bpf.node_metrics import time_wait
from bpf.store import PolicyStore
from bpf.sync import Change, Drop, Ledger, Put, Step
from modalmesh.base.settings import Settings
from xds.pb.bpf import policy_pb2

UP, LOWER_UP = 0x1, 0x10000


def interface(index: int, name: str = "eth0", flags: int = UP | LOWER_UP) -> Interface:
    return Interface(index, name, flags, bytes(6))


# ---- interfaces


def test_the_table_says_what_is_news() -> None:
    table = InterfaceTable()
    assert table.set(interface(3))
    assert not table.set(interface(3))
    assert table.set(interface(3, flags=UP))
    assert table.replace([interface(3)])
    assert not table.replace([interface(3)])
    assert table.remove(3)
    assert not table.remove(3)
    assert table.named("eth0") is None
    assert len(table) == 0


def test_the_younger_of_two_with_one_name() -> None:
    table = InterfaceTable()
    for index in (9, 3):
        table.set(interface(index))
    found = table.named("eth0")
    assert found is not None
    assert found.ifindex == 9


@pytest.mark.parametrize(("flags", "usable"), [(UP | LOWER_UP, True), (UP, False), (LOWER_UP, False), (0, False)])
def test_an_interface_takes_packets_when_it_is_up_and_has_a_carrier(flags: int, *, usable: bool) -> None:
    assert interface(1, flags=flags).usable is usable


# ---- the kernel's messages


def link(kind: int, index: int, family: int = socket.AF_UNSPEC, **attributes: Any) -> bytes:
    message = ifinfmsg()
    message["header"]["type"] = kind
    message["family"], message["index"], message["flags"] = family, index, UP | LOWER_UP
    message["attrs"] = [(f"IFLA_{name.upper()}", value) for name, value in attributes.items()]
    message.encode()
    return bytes(message.data)


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A monitor that reads from a socket of the test's own, and finds nothing when it asks."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setattr(netlink, "_open", lambda groups=0: its)
    monkeypatch.setattr(netlink, "dump", lambda message: iter(()))
    made = netlink.LinkMonitor()
    yield made, ours
    made.close()
    ours.close()


def test_events(monitor: tuple[netlink.LinkMonitor, socket.socket]) -> None:
    made, kernel = monitor
    assert not made.read()
    kernel.send(link(16, 7, ifname="rep0", address="02:00:00:00:00:07") + link(16, 8, ifname="rep1"))
    assert made.read()
    assert made.table.named("rep0") == Interface(7, "rep0", UP | LOWER_UP, bytes.fromhex("020000000007"))
    assert made.table.get(8)
    kernel.send(link(16, 7, ifname="rep0", address="02:00:00:00:00:07"))
    assert not made.read()
    kernel.send(link(17, 8, family=7, ifname="rep1"))  # it left a bridge
    assert not made.read()
    kernel.send(link(17, 8, ifname="rep1"))
    assert made.read()
    assert made.table.get(8) is None


@pytest.mark.parametrize(
    "data", [b"", b"\x10\x00", b"\xff\xff\xff\xff" + bytes(12), bytes(16), b"\x08\x00\x00\x00" * 4]
)
def test_damaged_messages_end_the_reading(monitor: tuple[netlink.LinkMonitor, socket.socket], data: bytes) -> None:
    made, kernel = monitor
    kernel.send(data)
    assert not made.read()


def test_addresses_of_virtual_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        ("IFLA_VF_INFO", {"attrs": [("IFLA_VF_MAC", {"vf": number, "mac": mac})]})
        for number, mac in ((0, "02:00:00:00:00:0a"), (1, "00:00:00:00:00:00"))
    ]
    data = link(16, 3, ifname="eth0", vfinfo_list={"attrs": entries})
    monkeypatch.setattr(netlink, "ask", lambda message, flags: (item for _, item in netlink._messages(data)))
    assert netlink.vf_macs(3) == {0: bytes.fromhex("02000000000a")}  # the other has none yet


# ---- stored policies


def body(**values: Any) -> bytes:
    return json_format.ParseDict(values, policy_pb2.NodePolicy()).SerializeToString()


MARK = body(tierMarks=[{"mark": 1, "tier": 1}])
OTHER_MARK = body(tierMarks=[{"mark": 2, "tier": 1}])


def test_updates_add_up_and_a_refused_one_changes_nothing() -> None:
    store = PolicyStore("node-1")
    store.apply({"a": MARK})
    store.apply({"b": OTHER_MARK})
    before = store.current
    with pytest.raises(NodePolicyError):
        store.apply({"c": MARK})
    assert store.current is before
    assert before is not None
    assert set(before.tier_marks) == {1, 2}
    assert set(store.apply({}, ["a", "never there"]).tier_marks) == {2}


def test_the_copy_holds_until_the_control_plane_speaks(tmp_path: Path) -> None:
    path = tmp_path / "state" / "policies"
    first = PolicyStore("node-1")
    first.apply({"a": MARK})
    first.save(path)
    second = PolicyStore("node-1")
    found = second.restore(path)
    assert found is not None
    assert set(found.tier_marks) == {1}
    assert set(second.apply({"b": OTHER_MARK}).tier_marks) == {2}
    second.save(path)
    again = PolicyStore("node-1").restore(path)
    assert again is not None
    assert set(again.tier_marks) == {2}
    assert [item.name for item in path.parent.iterdir()] == ["policies"]


def test_a_copy_that_is_missing_or_damaged(tmp_path: Path) -> None:
    store = PolicyStore("node-1")
    assert store.restore(tmp_path / "none") is None
    (tmp_path / "bad").write_bytes(b"\xff")
    with pytest.raises(NodePolicyError, match="can't be read"):
        store.restore(tmp_path / "bad")
    assert store.current is None


def test_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("tierMarks:\n  - {mark: 1, tier: 1}\n")
    assert policy_file.read(path) == MARK
    path.write_text("tier_marks:\n  - {mark: 1, tier: 1}\n")
    assert policy_file.read(path) == MARK
    path.write_text("")
    assert policy_file.read(path) == b""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\na: [", r"policy.yaml:2: .*MM1721"),
        ("services: 3", "is no NodePolicy"),
        ("nonsense: 3", "nonsense"),
        ("[1, 2]", "is no NodePolicy"),
        ("just text", "is no NodePolicy"),
        ("services: !!python/object:os.system {}", "MM1721"),
        ("node: \xff".encode("latin-1"), "UTF-8"),
    ],
)
def test_a_policy_file_that_is_none(tmp_path: Path, text: str | bytes, why: str) -> None:
    path = tmp_path / "policy.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PolicyFileError, match=why):
        policy_file.read(path)
    with pytest.raises(PolicyFileError, match="No such file"):
        policy_file.read(tmp_path / "none")


# ---- changes carried out


class FakeMaps:
    """Holds so many entries in all."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.maps: dict[str, dict[bytes, bytes]] = {"services": {}, "backend_slots": {}, "tier_marks": {}}

    def take(self, step: Step) -> None:
        held = self.maps[step.map]
        if isinstance(step, Drop):
            for key in step.keys:
                held.pop(key, None)
            return
        for key, value in step.entries:
            if step.map == "services" and key == b"bad":
                raise BpfError("refused")
            if key not in held and len(held) == self.room:
                raise MapFullError(f"update of map {step.map} failed")
            held[key] = value

    def content(self, name: str) -> dict[bytes, bytes]:
        return dict(self.maps[name])


def table(name: bytes, *rows: bytes) -> Change:
    put: tuple[Step, ...] = (
        Put("backend_slots", tuple((row, b"") for row in rows)),
        Put("services", ((name, b""),)),
    )
    return Change(name.decode(), put, undo=(Drop("backend_slots", rows),), commit=1)


def test_a_change_that_fails_is_taken_back_and_keeps_no_other_back() -> None:
    maps = FakeMaps(room=3)
    ledger = Ledger({name: {} for name in maps.maps})
    changes = [
        table(b"a", b"1"),
        table(b"b", b"2", b"3", b"4"),
        table(b"bad", b"5"),
        table(b"c", b"6", b"7"),
    ]
    outcome = carry_out(cast("Datapath", maps), ledger, changes)
    assert [(failure.subject, failure.map, failure.full) for failure in outcome.failures] == [
        ("b", "backend_slots", True),
        ("bad", "services", False),
    ]
    assert maps.maps["backend_slots"].keys() == {b"1", b"6", b"7"}
    assert maps.maps["services"].keys() == {b"a", b"c"}
    assert ledger.contents == maps.maps


def test_what_fits_stays_where_nothing_can_be_taken_back() -> None:
    maps = FakeMaps(room=2)
    ledger = Ledger({name: {} for name in maps.maps})
    put = Put("tier_marks", tuple((bytes([number]), b"") for number in range(5)))
    outcome = carry_out(cast("Datapath", maps), ledger, [Change("map tier_marks", (put,))])
    assert [failure.full for failure in outcome.failures] == [True]
    assert ledger.contents["tier_marks"] == maps.maps["tier_marks"]
    assert len(maps.maps["tier_marks"]) == 2


# ---- the service


def test_the_unit_has_the_capabilities_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    text = install.unit(Settings())
    lines = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    assert lines["CapabilityBoundingSet"] == "CAP_BPF CAP_NET_ADMIN CAP_PERFMON"
    assert lines["NoNewPrivileges"] == "yes"
    assert lines["ExecStart"].endswith("-m modalmesh.cli node")
    assert "Environment" not in lines
    monkeypatch.setenv("MODALMESH_CONFIG", "/etc/modalmesh.yaml")
    assert "Environment=MODALMESH_CONFIG=/etc/modalmesh.yaml\n" in install.unit(Settings())


def test_the_unit_is_written(tmp_path: Path) -> None:
    install.write("text", tmp_path / "a" / "unit")
    assert (tmp_path / "a" / "unit").read_text() == "text"
    with pytest.raises(InstallError):
        install.write("text", tmp_path / "a" / "unit" / "below")


def test_systemd_hears(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> None:
    service_manager.notify("READY=1")  # nobody listens
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(short_dir / "notify"))
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(short_dir / "notify"))
        service_manager.notify("READY=1")
        assert systemd.recv(100) == b"READY=1"


def test_time_wait() -> None:
    assert time_wait("sockets: used 5\nTCP: inuse 1 orphan 0 tw 42 alloc 3 mem 0\nUDP: inuse 0\n") == 42
    assert time_wait("") == 0
    assert time_wait("TCP: tw") == 0


def test_the_daemonset_has_the_same_capabilities_and_is_not_privileged(root: Path) -> None:
    documents = list(yaml.safe_load_all((root / "deploy" / "kubernetes" / "node-agent.yaml").read_text()))
    (daemonset,) = [document for document in documents if document["kind"] == "DaemonSet"]
    pod = daemonset["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    context = container["securityContext"]
    assert {f"CAP_{name}" for name in context["capabilities"]["add"]} == set(install.CAPABILITIES)
    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["privileged"] is context["allowPrivilegeEscalation"] is False
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_example_is_a_policy(root: Path) -> None:
    body = policy_file.read(root / "deploy" / "examples" / "node" / "policy.yaml")
    policy = PolicyStore("node-1").apply({"example": body})
    assert len(policy.services) == len(policy.functions) == 1
