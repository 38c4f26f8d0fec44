from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from router.errors import EncoderMismatchError, PolicyError
from router.modality import Modality
from router.policy import Policy, PolicySet, check_encoder, parse
from xds.pb.router import policy_pb2

Build = Callable[..., policy_pb2.SemanticPolicy]


def parsed(message: policy_pb2.SemanticPolicy, name: str = "quick") -> Policy:
    return parse(name, message.SerializeToString())


def test_a_policy_has_a_matrix_for_each_modality(policy_message: Build) -> None:
    policy = parsed(policy_message())
    assert {m: [s.service_id for s in c.services] for m, c in policy.candidates.items()} == {
        Modality.TEXT: ["a", "b", "d"],
        Modality.IMAGE: ["b", "c"],
    }
    np.testing.assert_array_equal(policy.candidates[Modality.IMAGE].matrix, np.eye(4, dtype=np.float32)[1:3])
    assert policy.thresholds == {Modality.TEXT: 0.25, Modality.IMAGE: 0.1}
    assert policy.defaults[Modality.TEXT].service_id == "d"
    assert policy.top_k == 3
    with pytest.raises(ValueError, match="read-only"):
        policy.candidates[Modality.TEXT].matrix[0, 0] = 2


def test_a_named_model_finds_its_service(policy_message: Build) -> None:
    message = policy_message()
    message.services[2].model = "model-b"  # two services share it
    policy = parsed(message)
    found = policy.named("model-b")
    assert found is not None
    assert found.service_id == "b"
    assert policy.named("model-c") is None


def service(message: policy_pb2.SemanticPolicy, **changes: Any) -> None:
    for field, value in changes.items():
        message.services[1].ClearField(field)
        message.services[1].MergeFrom(policy_pb2.SemanticService(**{field: value}))


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda m: m.ClearField("model"), "no model name"),
        (lambda m: m.ClearField("encoder"), "no encoder"),
        (lambda m: m.ClearField("services"), "no services"),
        (lambda m: m.ClearField("hosts"), "no hosts"),
        (lambda m: m.ClearField("thresholds"), "no threshold"),
        (lambda m: service(m, clip_text_emb=[1.0, 0.0, 0.0]), "3 values instead of 4"),
        (lambda m: service(m, clip_text_emb=[]), "0 values instead of 4"),
        (lambda m: service(m, clip_text_emb=[float("nan"), 0, 0, 0]), "not finite"),
        (lambda m: service(m, clip_text_emb=[float("inf"), 0, 0, 0]), "not finite"),
        (lambda m: service(m, clip_text_emb=[0.0, 0, 0, 0]), "length 0 instead of 1"),
        (lambda m: service(m, clip_text_emb=[3e38, 3e38, 0, 0]), "instead of 1"),
        (lambda m: service(m, clip_text_emb=[1.0, 0.1, 0, 0]), "length 1.005"),
        (lambda m: service(m, service_id="a"), "'a' stands there twice"),
        (lambda m: service(m, service_id=""), "lacks its id"),
        (lambda m: service(m, cluster=""), "lacks its id, cluster"),
        (lambda m: service(m, model=""), "lacks its id, cluster or model"),
        (lambda m: service(m, model="auto"), "leaves the choice open"),
        (lambda m: service(m, modalities=[]), "takes no modality"),
        (lambda m: service(m, modalities=[policy_pb2.MODALITY_UNSPECIFIED]), "doesn't know"),
        (lambda m: service(m, modalities=[17]), "doesn't know"),
        (lambda m: m.defaults.add(modality=policy_pb2.IMAGE, service_id="x"), "'x', which is none of the services"),
        (lambda m: m.defaults.add(modality=policy_pb2.IMAGE, service_id="a"), "doesn't take image"),
        (lambda m: m.defaults.add(modality=policy_pb2.TEXT, service_id="a"), "two defaults for text"),
        (lambda m: m.thresholds.add(modality=policy_pb2.TEXT, similarity=0.5), "two thresholds for text"),
        (lambda m: m.thresholds.add(modality=policy_pb2.AUDIO, similarity=1.5), "no cosine similarity"),
        (lambda m: m.thresholds.add(modality=policy_pb2.AUDIO, similarity=float("nan")), "no cosine similarity"),
        (lambda m: m.thresholds.add(similarity=0.5), "modality 0"),
        (lambda m: m.hosts.append("*"), "'*' stands there twice"),
        (lambda m: m.hosts.append("a.*.com"), "no host"),
        (lambda m: m.hosts.append("*.*.com"), "no host"),
        (lambda m: m.hosts.append("*a.com"), "no host"),
        (lambda m: m.hosts.append("a.com:80"), "no host"),
        (lambda m: m.hosts.append(""), "no host"),
    ],
)
def test_refuses(policy_message: Build, spoil: Callable[[Any], object], text: str) -> None:
    message = policy_message()
    parsed(message)
    spoil(message)
    with pytest.raises(PolicyError) as error:
        parsed(message)
    assert text in str(error.value)
    assert "'quick'" in str(error.value)
    assert error.value.code == "MM1603"


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(PolicyError, match="no SemanticPolicy"):
        parse("quick", b"\xff\xff")


def test_top_k_has_a_default(policy_message: Build) -> None:
    assert parsed(policy_message(top_k=0)).top_k == 3


def test_another_encoder_is_a_mismatch(policy_message: Build) -> None:
    policy = parsed(policy_message())
    check_encoder(policy, "00112233aabbccdd", 4)
    with pytest.raises(EncoderMismatchError, match="computed with encoder 00112233aabbccdd, but ffff runs here"):
        check_encoder(policy, "ffff", 4)
    with pytest.raises(EncoderMismatchError, match="vectors of 4 values"):
        check_encoder(policy, "00112233aabbccdd", 5)


@pytest.mark.parametrize(
    ("authority", "expected"),
    [
        ("api.example.com", "exact"),
        ("API.Example.COM:8443", "exact"),
        ("other.example.com", "suffix"),
        ("a.deep.example.com", "deep"),
        ("deep.example.com", "suffix"),
        ("example.com", "any"),
        (".example.com", "any"),
        ("notexample.com", "any"),
        ("127.0.0.1:10000", "any"),
        ("[::1]:10000", "loopback"),
        ("[::1]", "loopback"),
        ("", "any"),
        (":", "any"),
    ],
)
def test_the_closest_host_wins(policy_message: Build, authority: str, expected: str) -> None:
    hosts = {
        "exact": "api.example.com",
        "suffix": "*.example.com",
        "deep": "*.deep.example.com",
        "any": "*",
        "loopback": "[::1]",
    }
    policies = PolicySet(parsed(policy_message(hosts=[host]), name) for name, host in hosts.items())
    found = policies.pick(authority)
    assert found is not None
    assert found.name == expected


def test_without_a_match_there_is_no_policy(policy_message: Build) -> None:
    policies = PolicySet([parsed(policy_message(hosts=["a.com", "*.b.com"]))])
    assert policies.pick("c.com") is None
    assert policies.hosts == ("*.b.com", "a.com")
    assert PolicySet().pick("a.com") is None


def test_two_policies_for_one_host_are_refused(policy_message: Build) -> None:
    with pytest.raises(PolicyError, match=r"'one' and 'two' both claim host 'a.com'"):
        PolicySet([parsed(policy_message(hosts=["a.com"]), "two"), parsed(policy_message(hosts=["A.com"]), "one")])
