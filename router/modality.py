"""The kinds of content that a request can carry, by the names that policies, metrics and metadata use."""

from __future__ import annotations

from enum import StrEnum

from xds.pb.router import policy_pb2

__all__ = ["Modality"]


class Modality(StrEnum):
    """What a request carries. ``UNKNOWN`` never stands in a policy."""

    TEXT = "text"
    IMAGE = "image"
    AUDIO = "audio"
    VIDEO = "video"
    UNKNOWN = "unknown"

    @classmethod
    def from_message(cls, number: int) -> Modality:
        """Return the modality of a ``modalmesh.router.v1.Modality``; ``UNKNOWN`` for any that we don't know."""
        return _BY_NUMBER.get(number, cls.UNKNOWN)


_BY_NUMBER: dict[int, Modality] = {
    policy_pb2.TEXT: Modality.TEXT,
    policy_pb2.IMAGE: Modality.IMAGE,
    policy_pb2.AUDIO: Modality.AUDIO,
    policy_pb2.VIDEO: Modality.VIDEO,
}
