"""Real requests for a running mesh: what to send, sending it, and what came back.

Why this exists: `modalmesh run` must show that requests travel the whole way, so they are sent by tritonclient, an
ordinary KServe v2 client that knows nothing of the mesh; all it is told is the model name ``auto``.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tritonclient.grpc as kserve
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from tritonclient.utils import InferenceServerException

from modalmesh.base.errors import MachineError, UsageError
from modalmesh.base.settings import Settings

__all__ = ["Outcome", "Request", "Routed", "read_requests", "send_all"]

_DEADLINE = 10.0
_LOG_WITHIN = 5.0


class Request(BaseModel):
    """One request and where it must go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: Annotated[str, Field(min_length=1)] | None = None
    picture: Annotated[str, Field(pattern=r"^\w+(/[\w.-]+)+$")] | None = None
    expect: str
    because: str = "matched"

    @model_validator(mode="after")
    def _one_content(self) -> Request:
        if (self.text is None) == (self.picture is None):
            raise ValueError("give either text or picture")
        return self

    @property
    def title(self) -> str:
        """What to call the request in a table."""
        return f"“{self.text}”" if self.text else str(self.picture).rsplit("/", 1)[-1]

    def tensor(self) -> tuple[str, bytes]:
        """Return the input's name and its content: UTF-8, or the picture's file as it is.

        Raises:
            MachineError: The package that holds the picture is not installed, or lacks it.
        """
        if self.text is not None:
            return "TEXT", self.text.encode()
        package, _, name = str(self.picture).partition("/")
        found = importlib.util.find_spec(package)
        folders = found.submodule_search_locations if found else None
        for folder in folders or ():
            path = Path(folder) / name
            if path.is_file():
                return "IMAGE", path.read_bytes()
        raise MachineError(f"the picture {self.picture} is not installed", hint="run `make install`")


class _RequestFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    requests: Annotated[list[Request], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Routed:
    """What Envoy's access log says of one request; times in milliseconds."""

    service: str
    model: str
    modality: str
    reason: str
    similarity: float | None
    runner_up: str
    runner_up_similarity: float | None
    router_ms: float
    backend_ms: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request's fate."""

    request: Request
    routed: Routed | None
    """None: Envoy logged no decision for it."""
    answered_by: str
    """The model that answered, by its own word; empty: none did."""
    answer: str

    @property
    def right(self) -> bool:
        """Whether the request went where it should, by the router's word and by the backend's."""
        return (
            self.routed is not None
            and self.routed.service == self.request.expect
            and self.routed.reason == self.request.because
            and bool(self.answered_by)
            and self.answered_by == self.routed.model
        )


def read_requests(path: Path) -> list[Request]:
    """Read a file of requests.

    Raises:
        UsageError: It can't be read or is not valid.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _RequestFile.model_validate(document).requests
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} can't be read: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path} is not a file of requests: {place}: {first['msg']}") from error


def send_all(requests: Iterable[Request], settings: Settings) -> Iterator[Outcome]:
    """Send requests through the gateway one after the other and say what became of each."""
    client = kserve.InferenceServerClient(settings.gateway.listen)
    try:
        for number, request in enumerate(requests, start=1):
            yield _send(client, request, f"quickstart-{number}-{time.time_ns():x}", settings.access_log)
    finally:
        client.close()


def _send(client: Any, request: Request, request_id: str, access_log: Path) -> Outcome:
    name, content = request.tensor()
    tensor = kserve.InferInput(name, [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[content]], dtype=np.object_))
    offset = access_log.stat().st_size if access_log.exists() else 0
    try:
        result = client.infer("auto", [tensor], request_id=request_id, client_timeout=_DEADLINE)
    except InferenceServerException as error:
        return Outcome(request, _routed(access_log, offset, request_id), "", f"{error.status()}: {error.message()}")
    answered_by = result.get_response().model_name
    return Outcome(request, _routed(access_log, offset, request_id), answered_by, _answer(result))


def _answer(result: Any) -> str:
    labels = result.as_numpy("LABEL")
    if labels is not None:
        return f"{labels.ravel()[0].decode()} ({result.as_numpy('SCORE').ravel()[0]:.0%})"
    vector = result.as_numpy("EMBEDDING").ravel()
    return f"vector of {vector.size} values"


def _routed(access_log: Path, offset: int, request_id: str) -> Routed | None:
    """Wait for the access log's line about a request; Envoy writes it when the request is over."""
    deadline = time.monotonic() + _LOG_WITHIN
    while time.monotonic() < deadline:
        if access_log.exists():
            with access_log.open("rb") as log:
                log.seek(offset)
                for line in log:
                    entry = json.loads(line) if line.endswith(b"\n") else {}
                    decision = entry.get("decision") or {}
                    if decision.get("request_id") == request_id:
                        return _from_log(decision, entry)
        time.sleep(0.02)
    return None


def _from_log(decision: dict[str, Any], entry: dict[str, Any]) -> Routed:
    backend = entry.get("backend_us")
    return Routed(
        service=decision.get("service") or "",
        model=decision.get("model") or "",
        modality=decision.get("modality") or "",
        reason=decision.get("reason") or "",
        similarity=decision.get("similarity"),
        runner_up=decision.get("runner_up") or "",
        runner_up_similarity=decision.get("runner_up_similarity"),
        router_ms=float(decision.get("router_us") or 0) / 1000,
        backend_ms=None if backend is None else float(backend) / 1000,
    )
