"""``SemanticRoute``: which services the content of a request may choose between, and what each is good at."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, Field

from controlplane.kinds.base import HostPattern, Kind, Model, ModelName

__all__ = ["API_VERSION", "DEFAULT_THRESHOLDS", "Modality", "SemanticRoute"]

API_VERSION = "modalmesh.io/v1alpha1"

Modality: TypeAlias = Literal["text", "image", "audio", "video"]

# Measured with the starter encoder: related texts lie above 0.25, a picture and a fitting description above 0.1.
DEFAULT_THRESHOLDS: dict[Modality, float] = {"text": 0.25, "image": 0.1}

Similarity = Annotated[float, Field(ge=-1, le=1)]


def _description(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty: write one that requests can be compared with, or leave the field out")
    return " ".join(text.split())


def _distinct(modalities: list[Modality]) -> list[Modality]:
    if len(set(modalities)) != len(modalities):
        raise ValueError("names a modality twice")
    return modalities


class SemanticServiceEntry(Model):
    """A service that may be chosen."""

    service: str
    model: ModelName
    modalities: Annotated[list[Modality], Field(min_length=1), AfterValidator(_distinct)]
    description: Annotated[str, Field(max_length=8192), AfterValidator(_description)] = ""
    """What requests are compared with. Without one the service is never the most similar: it serves as a default, or
    those who name its model."""


class SemanticRouteSpec(Model):
    """What is to be."""

    hosts: Annotated[list[HostPattern], Field(min_length=1)] = Field(default_factory=lambda: ["*"])
    model: ModelName = "auto"
    """The model name by which a client leaves the choice to the router."""
    top_k: Annotated[int, Field(ge=1, le=100)] = 3
    thresholds: dict[Modality, Similarity] = Field(default_factory=dict)
    services: Annotated[list[SemanticServiceEntry], Field(min_length=1)]
    defaults: dict[Modality, str] = Field(default_factory=dict)


class SemanticRoute(Kind):
    """The document."""

    api_version: Literal["modalmesh.io/v1alpha1"]
    kind: Literal["SemanticRoute"]
    spec: SemanticRouteSpec
