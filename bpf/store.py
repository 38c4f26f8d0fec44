"""The policies in force, by resource name, and the copy of them on disk.

Why a copy: an agent that starts while the control plane is away must know what its predecessor knew, or it could not
follow an interface that goes down meanwhile. It lies in a directory that doesn't outlive a reboot, and neither do the
pinned maps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from google.protobuf.message import DecodeError

from bpf.node_errors import NodePolicyError
from bpf.policy import Fragment, Policy, check, combine, parse
from xds.pb.bpf import policy_pb2

__all__ = ["PolicyStore"]


class PolicyStore:
    """Policies of one node.

    Args:
        node: Its id.

    Attributes:
        current: What is in force; None: nothing is known yet.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._fragments: dict[str, Fragment] = {}
        # What the copy on disk is put together from: a serialised map is the sequence of its entries.
        self._entries: dict[str, bytes] = {}
        self._is_whole = False
        self.current: Policy | None = None

    def apply(self, changed: Mapping[str, bytes], removed: Iterable[str] = ()) -> Policy:
        """Take an update as a whole, or refuse it as a whole; the first one replaces what came from disk.

        Args:
            changed: Serialised NodePolicy messages by resource name.
            removed: Names that are no more.

        Raises:
            NodePolicyError: It can't be used; what is in force stays.
        """
        fresh = {name: parse(name, body) for name, body in changed.items()}
        gone = frozenset(removed)
        fragments = {
            name: held for name, held in self._fragments.items() if self._is_whole and name not in gone
        } | fresh
        policy = combine(fragments.values(), self._node)
        kept = {name: held for name, held in self._entries.items() if name in fragments}
        self._entries = kept | {name: _entry(name, body) for name, body in changed.items()}
        self._fragments, self.current, self._is_whole = fragments, policy, True
        return policy

    def save(self, path: Path) -> None:
        """Write the copy, in one step.

        Raises:
            OSError: It can't be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            partial.write_bytes(b"".join(self._entries.values()))
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()

    def restore(self, path: Path) -> Policy | None:
        """Return what the copy says, None if there is none.

        Raises:
            NodePolicyError: It can't be used; the control plane will have to say.
        """
        try:
            saved = policy_pb2.SavedPolicies.FromString(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, DecodeError) as error:
            raise NodePolicyError(f"saved policies in {path} can't be read: {error}") from error
        fragments = {name: check(name, message) for name, message in saved.policies.items()}
        self.current = combine(fragments.values(), self._node)
        self._fragments = fragments
        self._entries = {name: _entry(name, message.SerializeToString()) for name, message in saved.policies.items()}
        return self.current


def _entry(name: str, body: bytes) -> bytes:
    saved = policy_pb2.SavedPolicies()
    saved.policies[name].MergeFromString(body)
    return saved.SerializeToString()
