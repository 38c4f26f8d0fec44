"""A SemanticPolicy, checked and made ready to decide with; and the set of all that are in force.

Both are immutable: an update makes a new set and swaps one reference, so that no request sees half of it. A policy
that can't be used is refused as a whole with a text that says why, which the sender sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from router.errors import EncoderMismatchError, PolicyError
from router.modality import Modality
from xds.pb.router import policy_pb2

__all__ = ["TYPE_URL", "Candidates", "Policy", "PolicySet", "Service", "check_encoder", "parse"]

TYPE_URL = "type.googleapis.com/modalmesh.router.v1.SemanticPolicy"

DEFAULT_TOP_K = 3

# A unit vector that went through float32 is off by less than 1e-6; one that is farther off was never normalised.
_LENGTH_TOLERANCE = 1e-3

_ENCODED = (Modality.TEXT, Modality.IMAGE)
"""What an encoder turns into vectors, and so what needs a threshold."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service that may be chosen."""

    service_id: str
    cluster: str
    model: str
    modalities: frozenset[Modality]
    description: str


@dataclass(frozen=True, slots=True)
class Candidates:
    """The described services that take a modality, by service_id, and their vectors, float32[n, dimension]."""

    services: tuple[Service, ...]
    matrix: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy, ready to decide with."""

    name: str
    hosts: tuple[str, ...]
    model: str
    top_k: int
    fingerprint: str
    dimension: int
    services: tuple[Service, ...]
    candidates: Mapping[Modality, Candidates]
    thresholds: Mapping[Modality, float]
    defaults: Mapping[Modality, Service]

    def named(self, model: str) -> Service | None:
        """Return the service of a model; of several with the same model the first by service_id."""
        return next((service for service in self.services if service.model == model), None)


class PolicySet:
    """All policies in force; immutable."""

    __slots__ = ("_any", "_exact", "_suffixes", "policies")

    def __init__(self, policies: Iterable[Policy] = ()) -> None:
        """Index the policies by host.

        Raises:
            PolicyError: Two policies claim the same host.
        """
        self.policies = tuple(sorted(policies, key=lambda policy: policy.name))
        owners: dict[str, Policy] = {}
        for policy in self.policies:
            for host in policy.hosts:
                other = owners.setdefault(host, policy)
                if other is not policy:
                    raise PolicyError(f"policies {other.name!r} and {policy.name!r} both claim host {host!r}")
        self._any = owners.pop("*", None)
        self._exact = {host: policy for host, policy in owners.items() if not host.startswith("*")}
        suffixes = [(host[1:], policy) for host, policy in owners.items() if host.startswith("*")]
        self._suffixes = sorted(suffixes, key=lambda item: -len(item[0]))

    def pick(self, authority: str) -> Policy | None:
        """Return the policy for an ``:authority``: exact host, else longest suffix wildcard, else ``*``, else None."""
        host = _host_of(authority)
        if host in self._exact:
            return self._exact[host]
        for suffix, policy in self._suffixes:
            # «*.example.com» needs something where the star is (Envoy's virtual hosts have the same rule).
            if host.endswith(suffix) and len(host) > len(suffix):
                return policy
        return self._any

    @property
    def hosts(self) -> tuple[str, ...]:
        """Every host that some policy names."""
        return tuple(sorted({host for policy in self.policies for host in policy.hosts}))


def _host_of(authority: str) -> str:
    host = authority.lower()
    if host.startswith("["):
        return host[: host.find("]") + 1] if "]" in host else host
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and ":" not in name else host


def parse(name: str, body: bytes) -> Policy:
    """Read and check a serialised SemanticPolicy.

    Args:
        name: The resource's name, for messages and order.
        body: ``modalmesh.router.v1.SemanticPolicy``.

    Raises:
        PolicyError: It can't be used; says why.
    """
    try:
        message = policy_pb2.SemanticPolicy.FromString(body)
    except DecodeError as error:
        raise PolicyError(f"policy {name!r} is no SemanticPolicy message") from error
    try:
        return _checked(name, message)
    except PolicyError as error:
        raise PolicyError(f"policy {name!r}: {error.what}", hint=error.hint) from error


def check_encoder(policy: Policy, fingerprint: str, dimension: int) -> None:
    """Make sure that a policy's vectors can be compared with an encoder's.

    Raises:
        EncoderMismatchError: They come from another encoder.
    """
    if policy.fingerprint != fingerprint:
        raise EncoderMismatchError(
            f"policy {policy.name!r} was computed with encoder {policy.fingerprint}, but {fingerprint} runs here",
            hint="give control plane and encoder process the same encoder.path",
        )
    if policy.dimension != dimension:
        raise EncoderMismatchError(
            f"policy {policy.name!r} has vectors of {policy.dimension} values, the encoder's have {dimension}"
        )


def _checked(name: str, message: policy_pb2.SemanticPolicy) -> Policy:
    if not message.model:
        raise PolicyError("no model name by which a client leaves the choice to the router")
    if not message.encoder.fingerprint or not message.encoder.dimension:
        raise PolicyError("no encoder: fingerprint and dimension are needed")
    if not message.services:
        raise PolicyError("no services")
    if len({item.service_id for item in message.services}) < len(message.services):
        raise PolicyError(f"service {_twice(item.service_id for item in message.services)!r} stands there twice")
    # A service without description is there for those that name its model, or as a default.
    vectors = {
        item.service_id: _vector(item, message.encoder.dimension)
        for item in message.services
        if item.description or item.clip_text_emb
    }
    services = tuple(
        sorted((_service(item, message.model) for item in message.services), key=lambda service: service.service_id)
    )
    candidates = {
        modality: _candidates(takers, vectors)
        for modality in Modality
        if (takers := tuple(s for s in services if s.service_id in vectors and modality in s.modalities))
    }
    thresholds = _thresholds(message)
    for modality in _ENCODED:
        if modality in candidates and modality not in thresholds:
            raise PolicyError(f"services take {modality}, but there is no threshold for it")
    return Policy(
        name=name,
        hosts=_hosts(message),
        model=message.model,
        top_k=message.top_k or DEFAULT_TOP_K,
        fingerprint=message.encoder.fingerprint,
        dimension=message.encoder.dimension,
        services=services,
        candidates=MappingProxyType(candidates),
        thresholds=MappingProxyType(thresholds),
        defaults=MappingProxyType(_defaults(message, services)),
    )


def _hosts(message: policy_pb2.SemanticPolicy) -> tuple[str, ...]:
    hosts = tuple(host.lower() for host in message.hosts)
    if not hosts:
        raise PolicyError("no hosts", hint="«*» stands for any")
    for host in hosts:
        wild = host == "*" or (host.startswith("*.") and len(host) > 2)
        if not host or ("*" in host and not (wild and host.count("*") == 1)) or _host_of(host) != host:
            raise PolicyError(f"{host!r} is no host", hint="a name without port, «*.suffix», or «*»")
    if len(set(hosts)) < len(hosts):
        raise PolicyError(f"host {_twice(hosts)!r} stands there twice")
    return hosts


def _service(item: policy_pb2.SemanticService, auto: str) -> Service:
    if not item.service_id or not item.cluster or not item.model:
        raise PolicyError(f"service {item.service_id!r} lacks its id, cluster or model")
    if item.model == auto:
        raise PolicyError(f"service {item.service_id!r}: its model is called {auto!r}, which leaves the choice open")
    modalities = frozenset(Modality.from_message(number) for number in item.modalities)
    if not modalities or Modality.UNKNOWN in modalities:
        raise PolicyError(f"service {item.service_id!r} takes no modality, or one that this router doesn't know")
    return Service(item.service_id, item.cluster, item.model, modalities, item.description)


def _vector(item: policy_pb2.SemanticService, dimension: int) -> NDArray[np.float32]:
    vector = np.asarray(item.clip_text_emb, dtype=np.float32)
    if vector.shape != (dimension,):
        raise PolicyError(f"service {item.service_id!r}: its vector has {vector.size} values instead of {dimension}")
    if not np.isfinite(vector).all():
        raise PolicyError(f"service {item.service_id!r}: its vector holds values that are not finite")
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if abs(length - 1) > _LENGTH_TOLERANCE:
        raise PolicyError(f"service {item.service_id!r}: its vector has length {length:.4g} instead of 1")
    return vector


def _candidates(services: tuple[Service, ...], vectors: Mapping[str, NDArray[np.float32]]) -> Candidates:
    matrix = np.stack([vectors[service.service_id] for service in services])
    matrix.flags.writeable = False
    return Candidates(services, matrix)


def _thresholds(message: policy_pb2.SemanticPolicy) -> dict[Modality, float]:
    thresholds: dict[Modality, float] = {}
    for item in message.thresholds:
        modality = _once(item.modality, thresholds, "threshold")
        if not -1 <= item.similarity <= 1:  # also refuses NaN
            raise PolicyError(f"threshold of {modality}: {item.similarity} is no cosine similarity")
        # The message holds float32; 0.25 must mean 0.25 again.
        thresholds[modality] = round(item.similarity, 6)
    return thresholds


def _defaults(message: policy_pb2.SemanticPolicy, services: tuple[Service, ...]) -> dict[Modality, Service]:
    by_id = {service.service_id: service for service in services}
    defaults: dict[Modality, Service] = {}
    for item in message.defaults:
        modality = _once(item.modality, defaults, "default")
        service = by_id.get(item.service_id)
        if service is None:
            raise PolicyError(f"the default of {modality} is {item.service_id!r}, which is none of the services")
        if modality not in service.modalities:
            raise PolicyError(f"the default of {modality} is {item.service_id!r}, which doesn't take {modality}")
        defaults[modality] = service
    return defaults


def _once(number: int, seen: Mapping[Modality, object], what: str) -> Modality:
    modality = Modality.from_message(number)
    if modality is Modality.UNKNOWN:
        raise PolicyError(f"a {what} is for modality {number}, which this router doesn't know")
    if modality in seen:
        raise PolicyError(f"two {what}s for {modality}")
    return modality


def _twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
