"""The node agent: keeps this node's kernel programs and maps as its policy says, whatever comes and goes.

It owns no traffic: programs and maps are pinned, so that what it set up goes on while it is stopped, killed or hung,
and its successor takes over what it finds. It reacts to three things, each of which ends in a comparison of what is
with what should be: policies (from the control plane or a file), interfaces that come and go, and the clock, by which
what failed is tried again and what somebody else changed is put right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, Literal

from bpf import foreign
from bpf import node_metrics as metrics
from bpf.apply import Failure, Outcome, carry_out
from bpf.datapath import Datapath, Hook, HookState, recover
from bpf.desired import Desired, Target, desired
from bpf.errors import LayoutError
from bpf.ground import cgroup_of
from bpf.layout import Service, ServiceKey, unpack_u32
from bpf.netlink import LinkMonitor
from bpf.node_errors import NetlinkError, NodePolicyError
from bpf.policy import Network, Policy
from bpf.routes import sync_blackholes
from bpf.store import PolicyStore
from bpf.sync import Ledger, plan_gpu, plan_mesh
from bpf.targets import find_targets, find_uplinks
from modalmesh.base.errors import ModalMeshError
from modalmesh.base.logging import get_logger
from modalmesh.base.settings import Settings

__all__ = ["NodeAgent"]

_log = get_logger()

_IF_MAP: Final = "gpu_if_map"
_REST: Final = 1.0
"""Seconds before a slot gets another meaning: longer than any program may still hold its number."""
_NAMED_IN_LOG: Final = 5


class NodeAgent:
    """One node's agent; everything but the loop that calls it.

    Args:
        settings: All settings.
        test_joining: Called once, when sockets are to be joined for the first time: has it found out whether this
            kernel does that right, and the result told to ``joining_tested``. Until then they are not joined.

    Attributes:
        datapath: Programs and maps.
    """

    def __init__(self, settings: Settings, test_joining: Callable[[], None]) -> None:
        self._settings = settings
        self._test_joining = test_joining
        self._joining: Literal["untested", "asked", "passed", "failed"] = "untested"
        self._node = settings.node.node_id
        self._store = PolicyStore(self._node)
        self._collector = metrics.MapCollector()
        self._ledger: Ledger | None = None
        self._desired = Desired()
        self._resting: dict[int, float] = {}
        self._reasons: dict[str, str] = {}
        self._failures: dict[tuple[str, str], Failure] = {}
        self._foreign: frozenset[foreign.ForeignProgram] = frozenset()
        self._conflicts: frozenset[Network] = frozenset()
        self._routes: frozenset[Network] | None = None
        self._unplaced: frozenset[str] = frozenset()
        self.monitor = LinkMonitor()
        self.datapath = self._new_datapath(staged=False)

    @property
    def policy(self) -> Policy | None:
        """What is in force; None: nothing is known yet."""
        return self._store.current

    @property
    def collector(self) -> metrics.MapCollector:
        """What the maps count, to be registered."""
        return self._collector

    # ---- start and end

    def start(self, now: float, policies: Mapping[str, bytes] | None = None) -> None:
        """Load programs, take over what a predecessor left, and bring policy into force as far as it is known.

        Args:
            now: Seconds on a monotonic clock.
            policies: From a file; None: the copy that a predecessor kept.

        Raises:
            LayoutError: Maps of another layout are there, and no policy to fill new ones with.
            BpfError: The kernel takes no programs.
            NodePolicyError: The file's policy can't be used.
        """
        if policies is not None:
            self._store.apply(policies)
        else:
            self._restore()
        recover(self._settings.bpf.pins)
        migrating = False
        try:
            self.datapath.load()
        except LayoutError as error:
            if self.policy is None:
                raise
            migrating = True
            _log.warning("maps of another layout are replaced; counters begin again", why=error.what)
            self.datapath.close()
            self.datapath = self._new_datapath(staged=True)
            self.datapath.load()
        for hook in self.datapath.refused:
            metrics.REFUSED_PROGRAMS.labels(hook).inc()
        self._ledger = Ledger(self.datapath.contents())
        if self.policy is not None:
            self._bring_into_force(now)
        if migrating:
            self.datapath.settle()
        self._show()

    def close(self) -> None:
        """Close descriptors; everything pinned goes on."""
        self._collector.show({}, metrics.Names)
        self.datapath.close()
        self.monitor.close()

    def _new_datapath(self, *, staged: bool) -> Datapath:
        node = self._settings.node
        return Datapath(self._settings.bpf.pins, node.hooks, xdp=node.xdp, staged=staged)

    def _restore(self) -> None:
        try:
            policy = self._store.restore(self._settings.node_policies)
        except NodePolicyError as error:
            _log.warning("the copy of the policies can't be used; waiting for the control plane", why=str(error))
            return
        if policy is not None:
            _log.info("policies of the predecessor are in force until the control plane speaks")

    # ---- what it reacts to

    def take_policies(self, changed: Mapping[str, bytes], removed: Iterable[str], now: float) -> None:
        """Bring an update into force as a whole.

        Raises:
            NodePolicyError: It is refused; what is in force stays.
        """
        try:
            policy = self._store.apply(changed, removed)
        except NodePolicyError as error:
            metrics.POLICY_UPDATES.labels("refused").inc()
            _log.warning("policy refused; the last good one stays in force", why=str(error))
            raise
        metrics.POLICY_UPDATES.labels("accepted").inc()
        self._bring_into_force(now)
        self._show()
        _log.info(
            "policy in force", services=len(policy.services), functions=len(policy.functions), changed=len(changed)
        )
        try:
            self._store.save(self._settings.node_policies)
        except OSError as error:
            _log.warning("policies can't be kept for a restart", why=str(error))

    def links_changed(self, now: float) -> None:
        """Follow interfaces that came, went, or went up or down."""
        if self.policy is None or self._ledger is None:
            return
        self._desired = desired(self.policy, self._node, self._find_targets(self.policy))
        self._sync_gpu(self._ledger, now)
        self._attach_interfaces(self.policy)
        self._show()

    def joining_tested(self, failure: ModalMeshError | None, now: float) -> None:
        """Join sockets from now on, or not at all."""
        self._joining = "passed" if failure is None else "failed"
        if failure is not None:
            self.datapath.keep_off("join", failure)
        self._bring_into_force(now)
        self._show()

    def look_after(self, now: float, *, thoroughly: bool) -> None:
        """Try again what failed, and put right what somebody else changed.

        Args:
            now: Seconds on a monotonic clock.
            thoroughly: Compare every map with what it should hold.
        """
        if self._ledger is None:
            return
        self._routes = None  # somebody may have removed one
        with contextlib.suppress(NetlinkError):
            self.monitor.resync()
        if thoroughly:
            self._audit(self._ledger)
        if self.policy is not None:
            self._bring_into_force(now)
        self._report_foreign()
        self._show()

    # ---- comparison

    def _bring_into_force(self, now: float) -> None:
        policy, ledger = self.policy, self._ledger
        if policy is None or ledger is None:
            return
        self._desired = desired(policy, self._node, self._find_targets(policy))
        self._note(carry_out(self.datapath, ledger, plan_mesh(ledger, self._desired)), "mesh")
        self._sync_gpu(ledger, now)
        # Hooks after maps: nothing is translated by half a table.
        self._attach(policy)
        self._attach_interfaces(policy)
        self._sync_routes(policy)

    def _sync_gpu(self, ledger: Ledger, now: float) -> None:
        if _IF_MAP not in self.datapath.maps:
            return
        # The kernel itself removes an interface that is deleted.
        ledger.contents[_IF_MAP] = self.datapath.content(_IF_MAP)
        self._resting = {slot: until for slot, until in self._resting.items() if until > now}
        changes, self._unplaced = plan_gpu(ledger, self._desired, resting=self._resting.keys())
        outcome = carry_out(self.datapath, ledger, changes)
        self._resting |= dict.fromkeys(outcome.freed, now + _REST)
        self._note(outcome, "gpu")

    def _audit(self, ledger: Ledger) -> None:
        found = self.datapath.contents()
        if found != ledger.contents:
            names = sorted(name for name in found if found[name] != ledger.contents.get(name))
            _log.warning("maps were changed by somebody else; put right", maps=names)
            self._ledger = ledger.replaced(found)
        for name, used in (
            ("service_stats", ledger.service_ids()),
            ("backend_stats", ledger.forget_endpoints()),
        ):
            if name in self.datapath.maps:
                counters = self.datapath.maps[name]
                counters.delete_many([key for key, _ in counters.items_per_cpu() if unpack_u32(key) not in used])

    def _find_targets(self, policy: Policy) -> dict[str, Target]:
        root, table = self._settings.node.sysfs, self.monitor.table
        targets, reasons = find_targets(root, table, policy.functions.values())
        for pcie in sorted(reasons.keys() - self._reasons.keys()):
            _log.warning("function has no interface; its packets take the plain way", function=pcie, why=reasons[pcie])
        for pcie in sorted(self._reasons.keys() & targets.keys()):
            _log.info("function has an interface again", function=pcie, interface=targets[pcie].name)
        self._reasons = reasons
        metrics.FUNCTIONS_WITHOUT_INTERFACE.set(len(reasons))
        return targets

    # ---- hooks

    def _attach(self, policy: Policy) -> None:
        wanted: dict[Hook, bool] = {
            "services": bool(policy.services),
            "join": bool(self._desired.join_endpoints) and self._may_join(),
            "signals": True,
        }
        cgroup = cgroup_of(self._settings)
        if cgroup is None:
            _log.error("no cgroup of version 2; service addresses take the plain way", hint="set bpf.cgroup")
            return
        for hook, is_wanted in wanted.items():
            if is_wanted:
                self.datapath.attach_cgroup(hook, cgroup)

    def _may_join(self) -> bool:
        if self._joining == "untested" and "join" in self._settings.node.hooks:
            self._joining = "asked"
            self._test_joining()
        return self._joining == "passed"

    def _attach_interfaces(self, policy: Policy) -> None:
        if not policy.functions:
            self.datapath.forget_interfaces(())
            return
        names = self._settings.node.interfaces or find_uplinks(self._settings.node.sysfs, policy.functions)
        there = [(name, found.ifindex) for name in names if (found := self.monitor.table.named(name)) is not None]
        self.datapath.forget_interfaces(there)
        for name, ifindex in there:
            self.datapath.attach_xdp(name, ifindex)

    def _report_foreign(self) -> None:
        ours = self.datapath.program_ids()
        cgroup = cgroup_of(self._settings)
        found: set[foreign.ForeignProgram] = set()
        if cgroup is not None:
            with contextlib.suppress(OSError):
                found.update(foreign.on_cgroup(cgroup, ours))
        for _, place in self.datapath.states:
            interface = self.monitor.table.named(place) if place else None
            if interface is not None:
                found.update(foreign.on_interface(interface.ifindex, ours))
        for program in sorted(found - self._foreign):
            _log.warning(
                "another program is on a hook of ours; both run",
                hook=program.hook,
                program=program.name or program.id,
                owner=foreign.owner(program),
            )
        self._foreign = frozenset(found)
        for owner in ("cilium", "unknown"):
            metrics.FOREIGN.labels(owner).set(sum(foreign.owner(program) == owner for program in found))

    # ---- routes

    def _sync_routes(self, policy: Policy) -> None:
        """A route goes with the hook: without translation, what a range's addresses mean is not ours to say."""
        wanted = policy.owned_ranges if self.datapath.attached("services") else frozenset()
        if wanted == self._routes:
            return
        try:
            conflicts = sync_blackholes(wanted)
        except NetlinkError as error:
            _log.error("routes of owned ranges are not in order", why=str(error))
            return
        for network in sorted(conflicts - self._conflicts, key=str):
            _log.warning("somebody else has a route for an owned range; it stays", range=str(network))
        self._conflicts, self._routes = conflicts, wanted

    # ---- what people see

    def _note(self, outcome: Outcome, part: str) -> None:
        """One line when something begins to fail, however often it is tried."""
        before = {subject for place, subject in self._failures if place == part}
        now = {failure.subject: failure for failure in outcome.failures}
        self._failures = {key: failure for key, failure in self._failures.items() if key[0] != part}
        self._failures |= {(part, subject): failure for subject, failure in now.items()}
        for failure in outcome.failures:
            if failure.full:
                metrics.MAP_FULL.labels(failure.map).inc()
        metrics.UNAPPLIED.set(len(self._failures) + len(self._unplaced))
        fresh = sorted(now.keys() - before)
        if fresh and not before:
            _log.error(
                "not everything is in force; the rest takes the plain way",
                first=fresh[:_NAMED_IN_LOG],
                count=len(fresh),
                why=now[fresh[0]].why,
            )
        elif before and not now:
            _log.info("everything is in force again", part=part)

    def _show(self) -> None:
        ledger, policy = self._ledger, self.policy
        if ledger is None:
            return
        # Copies: they are read at a scrape, by another thread.
        names = partial(_names, dict(ledger.slots), dict(ledger.contents.get("services", {})), policy or Policy())
        self._collector.show(self.datapath.maps, names)
        for (hook, place), state in self.datapath.states.items():
            for each in HookState:
                metrics.HOOKS.labels(hook, place, each.value).set(each is state)


def _names(slots: Mapping[str, int], services: Mapping[bytes, bytes], policy: Policy) -> metrics.Names:
    found: dict[int, str] = {}
    for raw, value in services.items():
        key = ServiceKey.unpack(raw)
        found[Service.unpack(value).id] = policy.services[key].name if key in policy.services else str(key.address)
    return metrics.Names({slot: pcie for pcie, slot in slots.items()}, found)
