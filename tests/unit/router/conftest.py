from __future__ import annotations

from collections.abc import Callable

import pytest

from xds.pb.router import policy_pb2

Message = policy_pb2.SemanticPolicy


def build(**changes: object) -> Message:
    """A policy of four services in a space of four dimensions; each description lies on an axis of its own."""
    axes = {name: [1.0 if place == axis else 0.0 for place in range(4)] for axis, name in enumerate("abcd")}
    message = Message(
        name="quick",
        hosts=["*"],
        model="auto",
        top_k=3,
        encoder=policy_pb2.EncoderIdentity(fingerprint="00112233aabbccdd", dimension=4),
        thresholds=[
            policy_pb2.Threshold(modality=policy_pb2.TEXT, similarity=0.25),
            policy_pb2.Threshold(modality=policy_pb2.IMAGE, similarity=0.1),
        ],
        services=[
            policy_pb2.SemanticService(
                service_id=name,
                cluster=f"cluster-{name}",
                model=f"model-{name}",
                modalities=modalities,
                description=f"what {name} does",
                clip_text_emb=axes[name],
            )
            for name, modalities in (
                ("a", [policy_pb2.TEXT]),
                ("b", [policy_pb2.TEXT, policy_pb2.IMAGE]),
                ("c", [policy_pb2.IMAGE]),
                ("d", [policy_pb2.TEXT]),
            )
        ],
        defaults=[policy_pb2.DefaultRoute(modality=policy_pb2.TEXT, service_id="d")],
    )
    for field, value in changes.items():
        message.ClearField(field)
        message.MergeFrom(Message(**{field: value}))  # type: ignore[arg-type]
    return message


@pytest.fixture
def policy_message() -> Callable[..., Message]:
    return build
