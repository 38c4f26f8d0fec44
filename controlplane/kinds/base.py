"""What all kinds have in common: strictness, metadata, and types of single values.

Strict: ``"8001"`` is not a port, ``1`` is not a boolean. An unknown field is an error, so that nobody believes that a
field has an effect which it has not.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

__all__ = [
    "Host",
    "HostPattern",
    "Kind",
    "Metadata",
    "Milliseconds",
    "Model",
    "ModelName",
    "Name",
    "Percent",
    "Port",
    "Timeout",
    "full_name",
    "ip",
    "milliseconds",
]


class Model(BaseModel):
    """Part of a document; field names are written in camelCase there."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=to_camel,
        allow_inf_nan=False,
        # Else a field that is called like a method of BaseModel is only warned about.
        protected_namespaces=(),
    )


_NAME = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9._-]{0,251}[a-zA-Z0-9])?", re.ASCII)
_LABEL = r"[a-zA-Z0-9_]([a-zA-Z0-9_-]{0,61}[a-zA-Z0-9_])?"
_DNS_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?", re.ASCII)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("is not a name: letters, digits, «.», «-» and «_», at most 253, no punctuation at its ends")
    if text.lower().startswith("modalmesh-"):
        raise ValueError("begins with «modalmesh-», which is kept for the mesh's own resources")
    return text


Name = Annotated[str, AfterValidator(_name)]
"""Of a service or a document: also an Envoy cluster, and part of file names and labels."""


def _model_name(text: str) -> str:
    if not text or len(text) > 255 or not text.isprintable() or text != text.strip():
        raise ValueError("is not the name of a model: 1 to 255 printable characters, no spaces around them")
    return text


ModelName = Annotated[str, AfterValidator(_model_name)]
"""As KServe's ``model_name``."""

Port = Annotated[int, Field(ge=1, le=65535)]


def ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a text is, if it is one; no zone (``fe80::1%eth0``)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return None if "%" in text else address


def _host(text: str) -> str:
    if ip(text) is not None:
        return text
    if len(text) > 253 or not _DNS_NAME.fullmatch(text) or text.rstrip(".").rpartition(".")[2].isdigit():
        raise ValueError("is neither an IP address nor a DNS name (an IPv6 address is written without brackets)")
    return text


Host = Annotated[str, AfterValidator(_host)]
"""Where an endpoint is: an IP address or a DNS name."""


def _host_pattern(text: str) -> str:
    lower = text.lower()
    rest = lower.removeprefix("*.")
    if lower == "*" or (not rest.endswith(".") and _DNS_NAME.fullmatch(rest) and len(rest) <= 253):
        return lower
    raise ValueError("is no host: a name without port, «*.» and a name, or «*»")


HostPattern = Annotated[str, AfterValidator(_host_pattern)]
"""An authority without port, or a pattern for several; in lower case."""

_DURATION_PART = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)(h|ms|m|s)", re.ASCII)
_ZERO = re.compile(r"0+(\.0+)?(h|ms|m|s)", re.ASCII)
_UNIT_MS = {"h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_LONGEST_MS = 3_600_000


def _milliseconds(text: str) -> str:
    if not milliseconds(text):
        raise ValueError("is not between 1 ms and 1 h")
    return text


def milliseconds(text: str) -> int:
    """Return the length of a duration as Istio writes it (``1.5s``, ``300ms``, ``1m30s``): 0, or 1 ms to 1 h.

    Raises:
        ValueError: It is none.
    """
    if _ZERO.fullmatch(text):
        return 0
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError("is not a duration such as «1.5s», «300ms» or «1m30s»")
    total = round(sum(float(number) * _UNIT_MS[unit] for number, unit in parts))
    if not 1 <= total <= _LONGEST_MS:
        raise ValueError("is not between 1 ms and 1 h")
    return total


Milliseconds = Annotated[str, AfterValidator(_milliseconds)]
"""A duration, kept as it is written; ``milliseconds`` gives its length."""


def _timeout(text: str) -> str:
    return text if _ZERO.fullmatch(text) else _milliseconds(text)


Timeout = Annotated[str, AfterValidator(_timeout)]
"""A duration that may be 0."""

Percent = Annotated[float, Field(ge=0, le=100)]


class Metadata(Model):
    """Kubernetes' metadata, as far as an author writes it; labels and annotations are the author's own."""

    name: Name
    namespace: Name | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class Kind(Model):
    """A whole document with ``apiVersion`` and ``kind``."""

    metadata: Metadata


def full_name(content: Kind) -> str:
    """Return ``name``, or ``namespace/name``: what tells documents of one kind apart."""
    metadata = content.metadata
    return f"{metadata.namespace}/{metadata.name}" if metadata.namespace else metadata.name
