"""What the status service says of a stream and of a fault."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from xds.consistency import Fault
from xds.pb.xds import status_pb2
from xds.snapshot import Snapshot
from xds.stream import AdsState
from xds.subscription import Subscription

__all__ = ["describe_client", "describe_fault"]


def describe_client(
    state: AdsState, *, group: str, encoding: str, opened: float, waiting: Snapshot | None, wall_offset: float
) -> status_pb2.Client:
    """Return the message about a stream.

    Args:
        state: The stream's state.
        group: Its group.
        encoding: Of its responses.
        opened: Seconds, on the clock of the state.
        waiting: What the group shall hold soon; a client that will be sent some of it is stale.
        wall_offset: What to add to that clock to get seconds since 1970.
    """
    client = status_pb2.Client(
        node_id=state.node.id, group=group, encoding=encoding, connected_since=_timestamp(opened + wall_offset)
    )
    for subscription in state.types.values():
        described = _type(subscription, state.snapshot, wall_offset)
        if waiting is not None and waiting.version(described.type_url) != described.current_version:
            described.current_version = waiting.version(described.type_url)
            described.state = status_pb2.STALE
        client.types.append(described)
    return client


def describe_fault(group: str, fault: Fault) -> status_pb2.Fault:
    """Return the message about a fault."""
    return status_pb2.Fault(
        group=group, type_url=fault.type_url, name=fault.name, reason=fault.reason, replaced=fault.replaced
    )


def _type(subscription: Subscription, snapshot: Snapshot | None, wall_offset: float) -> status_pb2.Type:
    held = subscription.held(snapshot)
    current = snapshot.version(subscription.type_url) if snapshot is not None else ""
    # What changed since is nothing that this client wants: it is as current as the snapshot.
    up_to_date = not subscription.unsettled and bool(held or subscription.last_number)
    return status_pb2.Type(
        type_url=subscription.type_url,
        resources=len(held),
        sent_version=current if up_to_date else subscription.sent_version,
        acked_version=current if up_to_date else subscription.acked_version,
        current_version=current,
        state=_state(subscription, has_something=bool(held)),
        last_error=subscription.error,
        since=_timestamp(subscription.since + wall_offset),
    )


def _state(subscription: Subscription, *, has_something: bool) -> status_pb2.State:
    if subscription.in_flight is not None:
        return status_pb2.STALE
    if subscription.error:
        return status_pb2.NACKED
    if not subscription.last_number and not has_something:
        return status_pb2.NOT_SENT
    return status_pb2.STALE if subscription.pending else status_pb2.SYNCED


def _timestamp(seconds: float) -> Timestamp:
    result = Timestamp()
    result.FromMilliseconds(int(seconds * 1000))
    return result
