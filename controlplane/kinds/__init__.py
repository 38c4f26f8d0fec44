"""The kinds of documents that are read, one module each, and how a document becomes one of them."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from controlplane.documents import Document, Path
from controlplane.errors import FieldError, KindError
from controlplane.kinds.base import Model
from controlplane.kinds.destination_rule import DestinationRule
from controlplane.kinds.qos_policy import QosPolicy
from controlplane.kinds.semantic_route import API_VERSION as OWN_VERSION
from controlplane.kinds.semantic_route import SemanticRoute
from controlplane.kinds.service_discovery import ServiceDiscovery
from controlplane.kinds.service_entry import ServiceEntry
from controlplane.kinds.virtual_service import API_VERSIONS as ISTIO_VERSIONS
from controlplane.kinds.virtual_service import VirtualService
from modalmesh.base.errors import DocumentError

__all__ = ["Content", "Read", "read"]

Content = ServiceDiscovery | VirtualService | DestinationRule | ServiceEntry | SemanticRoute | QosPolicy

_KINDS: Mapping[str, tuple[tuple[str, ...], type[Content]]] = {
    "VirtualService": (ISTIO_VERSIONS, VirtualService),
    "DestinationRule": (ISTIO_VERSIONS, DestinationRule),
    "ServiceEntry": (ISTIO_VERSIONS, ServiceEntry),
    "SemanticRoute": ((OWN_VERSION,), SemanticRoute),
    "QosPolicy": ((OWN_VERSION,), QosPolicy),
}


@dataclass(frozen=True, slots=True)
class Read:
    """A document and what it says."""

    document: Document
    content: Content


def read(document: Document) -> Read | list[DocumentError]:
    """Return what a document says, or everything that is wrong with its fields."""
    model = _model_of(document)
    if isinstance(model, DocumentError):
        return [model]
    try:
        return Read(document, model.model_validate(document.value))
    except ValidationError as error:
        return [_problem(document, model, item) for item in error.errors(include_url=False)]


def _model_of(document: Document) -> type[Content] | DocumentError:
    kind, version = document.value.get("kind"), document.value.get("apiVersion")
    if kind is None and version is None and "services" in document.value:
        return ServiceDiscovery
    known = ", ".join(f"{name} ({', '.join(versions)})" for name, (versions, _) in _KINDS.items())
    hint = f"kinds that are read: {known}; and service discovery: «services:» without apiVersion and kind"
    if not isinstance(kind, str) or not isinstance(version, str):
        missing = "kind" if not isinstance(kind, str) else "apiVersion"
        return KindError(f"the document has no {missing}", hint=hint, where=document.where((missing,)))
    if kind not in _KINDS or version.partition("/")[0] != _KINDS[kind][0][0].partition("/")[0]:
        return KindError(f"kind {kind} of {version} is not read here", hint=hint, where=document.where(("kind",)))
    versions, model = _KINDS[kind]
    if version not in versions:
        return KindError(
            f"version {version} of {kind} is not read here",
            hint=f"known: {', '.join(versions)}",
            where=document.where(("apiVersion",)),
        )
    return model


def _problem(document: Document, model: type[Model], item: ErrorDetails) -> FieldError:
    path: Path = item["loc"]
    name = _dotted(path)
    kind, hint = item["type"], ""
    if kind == "extra_forbidden":
        what = f"field {name} is not supported"
        hint = _supported(model, path)
    elif kind == "missing":
        what = f"field {name} is missing"
    elif kind == "value_error":
        reason = str(item["ctx"]["error"])
        value = item["input"]
        shown = f" {value!r}" if isinstance(value, str | int | float) else ""
        what = f"{name}:{shown[:80]} {reason}"
    else:
        what = f"{name}: {item['msg'][0].lower()}{item['msg'][1:]}"
        value = item["input"]
        if isinstance(value, str | int | float | None):
            what += f", not {str(value)[:80]!r}" if isinstance(value, str) else f", not {value}"
    return FieldError(what, hint=hint, where=document.where(path))


def _dotted(path: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "document"


def _supported(model: type[Model], path: Path) -> str:
    """Say which fields are supported where an unknown one stands, the most similar name first."""
    here: type[Model] | None = model
    for part in path[:-1]:
        if here is None or isinstance(part, int):
            continue
        field = next((field for name, field in here.model_fields.items() if part in (name, field.alias)), None)
        # Keys of a free mapping (header names) are no fields: the model stays that of its values.
        here = _model_in(field.annotation) if field else here
    if here is None:
        return ""
    names = [field.alias or name for name, field in here.model_fields.items()]
    near = difflib.get_close_matches(str(path[-1]), names, n=1)
    return f"did you mean {near[0]}?" if near else f"supported here: {', '.join(names)}"


def _model_in(annotation: object) -> type[Model] | None:
    """Return the model inside ``list[X]``, ``dict[str, X]``, ``X | None``."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _model_in(part))), None)
