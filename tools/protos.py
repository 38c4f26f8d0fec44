"""The protobuf messages of the project: which ones, where from, and how ``xds/pb`` is made.

Why this exists: the wheel ``xds-protos`` holds every message of Envoy's API but owns the top-level package ``xds``, so
it can never be installed beside ours. ``extract`` takes the descriptors of the files we need out of that wheel, once,
into ``xds/descriptors.binpb``; ``generate`` turns them and the project's own ``.proto`` files into typed modules under
``xds/pb``, with imports that begin with ``xds.pb``. ``setup.py`` and ``make`` call ``generate``.

    python tools/protos.py extract xds_protos-VERSION.whl     # seldom: a new Envoy release
    python tools/protos.py generate                           # each build
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DESCRIPTORS = ROOT / "xds" / "descriptors.binpb"
OUTPUT = ROOT / "xds" / "pb"

OWN_PROTOS = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("xds", "router", "bpf")
    for path in (ROOT / package).rglob("*.proto")
    if OUTPUT not in path.parents
)
"""The project's own messages, by path from the root; each package owns its files."""

ENVOY_ROOTS = (
    "envoy/admin/v3/config_dump.proto",
    "envoy/config/cluster/v3/cluster.proto",
    "envoy/config/core/v3/extension.proto",
    "envoy/config/endpoint/v3/endpoint.proto",
    "envoy/config/listener/v3/listener.proto",
    "envoy/config/route/v3/route.proto",
    "envoy/extensions/access_loggers/file/v3/file.proto",
    "envoy/extensions/access_loggers/stream/v3/stream.proto",
    "envoy/extensions/filters/http/ext_proc/v3/ext_proc.proto",
    "envoy/extensions/filters/http/header_mutation/v3/header_mutation.proto",
    "envoy/extensions/filters/http/router/v3/router.proto",
    "envoy/extensions/filters/network/http_connection_manager/v3/http_connection_manager.proto",
    "envoy/extensions/transport_sockets/tls/v3/tls.proto",
    "envoy/extensions/upstreams/http/v3/http_protocol_options.proto",
    "envoy/service/discovery/v3/ads.proto",
    "envoy/service/discovery/v3/discovery.proto",
    "envoy/service/ext_proc/v3/external_processor.proto",
    "envoy/service/status/v3/csds.proto",
)
"""What is used directly; the files these import come along."""

# Annotations speak to linters and validators that do not run here; without them ten files fewer are needed, and none
# that another wheel (googleapis-common-protos) also registers.
ANNOTATIONS = re.compile(
    r"^(validate|udpa/annotations|xds/annotations|envoy/annotations|google/api|envoy/api/annotations)/"
)

_EXTRACT = r"""
import importlib, sys
from google.protobuf import descriptor_pb2, descriptor_pool
roots, annotations, out = sys.argv[1].split(","), sys.argv[2], sys.argv[3]
import re
skip = re.compile(annotations)
seen, order = set(), []
def visit(name):
    if name in seen or skip.match(name) or name.startswith("google/protobuf/"):
        return
    seen.add(name)
    module = importlib.import_module(name.removesuffix(".proto").replace("/", ".").replace("-", "_") + "_pb2")
    proto = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    for dependency in proto.dependency:
        visit(dependency)
    order.append(proto)
for root in roots:
    visit(root)
def strip(message):
    # Only these options change what a parser does.
    for field, value in message.ListFields():
        if field.name == "options":
            kept = {n: getattr(value, n) for n in ("map_entry", "packed", "deprecated")
                    if n in value.DESCRIPTOR.fields_by_name and value.HasField(n)}
            value.Clear()
            for n, v in kept.items():
                setattr(value, n, v)
            if not kept:
                message.ClearField("options")
        elif field.message_type is not None:
            for item in (value if field.is_repeated else [value]):
                strip(item)
result = descriptor_pb2.FileDescriptorSet()
for proto in order:
    kept = [d for d in proto.dependency if not skip.match(d)]
    assert not proto.public_dependency and not proto.weak_dependency, proto.name
    del proto.dependency[:]
    proto.dependency.extend(kept)
    proto.ClearField("source_code_info")
    strip(proto)
    result.file.append(proto)
open(out, "wb").write(result.SerializeToString(deterministic=True))
print(len(result.file), "files", result.ByteSize(), "bytes")
"""


def extract(wheel: Path) -> None:
    """Write ``xds/descriptors.binpb`` from an ``xds-protos`` wheel.

    Runs in a child interpreter whose path begins with the unpacked wheel, so that this project's ``xds`` is not seen.
    The child's protobuf must be at least as new as the one the wheel was generated with.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, format="zip")
        subprocess.run(
            [sys.executable, "-c", _EXTRACT, ",".join(ENVOY_ROOTS), ANNOTATIONS.pattern, str(DESCRIPTORS)],
            check=True,
            cwd=folder,
        )


def generate(output: Path = OUTPUT) -> None:
    """Write typed protobuf modules for every descriptor into ``output`` (replaced as a whole).

    Raises:
        subprocess.CalledProcessError: protoc refused a ``.proto`` file; its message is on standard error.
    """
    import grpc_tools
    from google.protobuf import descriptor_pb2

    names = [f.name for f in descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file]
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    with tempfile.TemporaryDirectory() as folder:
        staging = Path(folder) / "pb"
        staging.mkdir()
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"--python_out={staging}",
            f"--pyi_out={staging}",
        ]
        subprocess.run(
            [*command, f"--descriptor_set_in={_with_well_known(DESCRIPTORS, folder)}", *names],
            check=True,
        )
        subprocess.run([*command, f"-I{ROOT}", f"-I{well_known}", *OWN_PROTOS], check=True)
        _own_imports(staging)
        if output.exists():
            shutil.rmtree(output)
        shutil.copytree(staging, output)


def _with_well_known(descriptors: Path, folder: str) -> Path:
    """Add google/protobuf/*.proto: protoc resolves imports of a descriptor set only inside it."""
    from google.protobuf import (
        any_pb2,
        descriptor_pb2,
        duration_pb2,
        empty_pb2,
        struct_pb2,
        timestamp_pb2,
        wrappers_pb2,
    )

    merged = descriptor_pb2.FileDescriptorSet()
    modules = (any_pb2, descriptor_pb2, duration_pb2, empty_pb2, struct_pb2, timestamp_pb2, wrappers_pb2)
    for module in modules:
        merged.file.append(descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb))
    merged.file.extend(descriptor_pb2.FileDescriptorSet.FromString(descriptors.read_bytes()).file)
    path = Path(folder) / "merged.binpb"
    path.write_bytes(merged.SerializeToString())
    return path


def _own_imports(staging: Path) -> None:
    """Prefix imports of generated modules with ``xds.pb`` and make every folder a package."""
    tops = "|".join(sorted(path.name for path in staging.iterdir() if path.is_dir()))
    pattern = re.compile(rf"^(from|import) (?!google\.protobuf)({tops})(?=[.\s])", re.MULTILINE)
    for path in [*staging.rglob("*.py"), *staging.rglob("*.pyi")]:
        text = path.read_text()
        path.write_text(pattern.sub(r"\1 xds.pb.\2", text))
    for folder in [staging, *(path for path in staging.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").write_text("")


def main() -> None:
    """Run one of the two steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("extract").add_argument("wheel", type=Path)
    steps.add_parser("generate")
    arguments = parser.parse_args()
    if arguments.step == "extract":
        extract(arguments.wheel)
    else:
        generate()


if __name__ == "__main__":
    main()
