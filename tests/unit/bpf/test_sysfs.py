"""Functions are found on machines built out of directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from bpf.policy import Function
from bpf.sysfs import find_facing, uplinks

MAC = bytes.fromhex("020000000007")


class Machine:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.devices = root / "bus" / "pci" / "devices"
        self.net = root / "class" / "net"
        self.net.mkdir(parents=True)

    def card(self, pcie: str, functions: dict[int, str], *, interfaces: tuple[str, ...] = ()) -> None:
        """A physical function with virtual ones."""
        self.device(pcie, *interfaces)
        for number, virtual in functions.items():
            self.device(virtual)
            (self.devices / virtual / "physfn").symlink_to(self.devices / pcie)
            (self.devices / pcie / f"virtfn{number}").symlink_to(self.devices / virtual)

    def device(self, pcie: str, *interfaces: str) -> None:
        (self.devices / pcie).mkdir(parents=True)
        for name in interfaces:
            (self.devices / pcie / "net" / name).mkdir(parents=True)

    def interface(self, name: str, *, switch: str = "", port: str = "", mac: str = "") -> None:
        (self.net / name).mkdir()
        for file, text in (("phys_switch_id", switch), ("phys_port_name", port), ("address", mac)):
            if text:
                (self.net / name / file).write_text(text + "\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Two cards in switchdev mode; the second physical function of the first has a switch of the same name."""
    made = Machine(tmp_path)
    made.card("0000:3b:00.0", {0: "0000:3b:00.2", 1: "0000:3b:00.3"}, interfaces=("eth0",))
    made.card("0000:3b:00.1", {0: "0000:3b:01.2"}, interfaces=("eth1",))
    made.card("0000:af:00.0", {0: "0000:af:00.2", 1: "0000:af:00.3"}, interfaces=("eth2", "rep_7"))
    for name, switch, port in (
        ("eth0", "aa", "p0"),
        ("eth1", "aa", "p1"),
        ("rep_0", "aa", "pf0vf0"),
        ("rep_1", "aa", "pf0vf1"),
        ("rep_2", "aa", "pf1vf0"),
        ("eth2", "bb", "p0"),
        ("rep_7", "bb", "pf0vf1"),
        ("rep_8", "bb", "c1pf0vf0"),
        ("other", "", ""),
    ):
        made.interface(name, switch=switch, port=port)
    return made


@pytest.mark.parametrize(
    ("pcie", "interface", "number"),
    [
        ("0000:3b:00.2", "rep_0", 0),
        ("0000:3b:00.3", "rep_1", 1),
        ("0000:3b:01.2", "rep_2", 0),
        ("0000:af:00.2", "rep_8", 0),
        ("0000:af:00.3", "rep_7", 1),
    ],
)
def test_a_virtual_function_is_faced_by_its_representor(
    machine: Machine, pcie: str, interface: str, number: int
) -> None:
    found = find_facing(machine.root, Function(pcie))
    assert (found.interface, found.number, found.reason) == (interface, number, "")


def test_its_own_interface_says_its_address(machine: Machine) -> None:
    (machine.devices / "0000:3b:00.2" / "net" / "vf").mkdir(parents=True)
    machine.interface("vf", mac="02:00:00:00:00:07")
    found = find_facing(machine.root, Function("0000:3b:00.2"))
    assert (found.interface, found.mac) == ("rep_0", MAC)


def test_its_own_interface_is_no_target_unless_the_policy_says_so(machine: Machine) -> None:
    machine.device("0000:01:00.0", "tap0")
    machine.interface("tap0")
    refused = find_facing(machine.root, Function("0000:01:00.0"))
    assert not refused.interface
    assert "no virtual function" in refused.reason
    assert find_facing(machine.root, Function("0000:01:00.0", plain_netdev=True, mac=MAC)).interface == "tap0"
    # A representor is better than a function's own interface, whatever is permitted.
    assert find_facing(machine.root, Function("0000:3b:00.2", plain_netdev=True)).interface == "rep_0"


def test_older_drivers_give_bare_numbers(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.card("0000:3b:00.0", {3: "0000:3b:00.5"}, interfaces=("eth0",))
    for name, port in (("eth0", "p0"), ("r3", "3"), ("r30", "30")):
        machine.interface(name, switch="aa", port=port)
    assert find_facing(tmp_path, Function("0000:3b:00.5")).interface == "r3"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ("device", "no such PCIe device"),
        ("virtfn", "doesn't list it"),
        ("legacy", "not in switchdev mode"),
        ("missing", "0 representors for virtual function 0"),
        ("twice", "2 representors for virtual function 0"),
    ],
)
def test_why_there_is_none(machine: Machine, broken: str, reason: str) -> None:
    function = Function("0000:3b:00.2", plain_netdev=True)
    match broken:
        case "device":
            function = Function("0000:ff:00.0")
        case "virtfn":
            (machine.devices / "0000:3b:00.0" / "virtfn0").unlink()
        case "legacy":
            (machine.net / "eth0" / "phys_switch_id").unlink()
        case "missing":
            (machine.net / "rep_0" / "phys_port_name").write_text("pf0sf0\n")
        case "twice":
            machine.interface("rep_x", switch="aa", port="pf0vf0")
    found = find_facing(machine.root, function)
    assert not found.interface
    assert reason in found.reason


def test_uplinks(machine: Machine) -> None:
    assert uplinks(machine.root, "0000:3b:00.2") == ("eth0",)
    assert uplinks(machine.root, "0000:af:00.3") == ("eth2",)
    assert uplinks(machine.root, "0000:ff:00.0") == ()


def test_a_machine_without_anything(tmp_path: Path) -> None:
    assert find_facing(tmp_path, Function("0000:3b:00.2")).reason == "no such PCIe device"
