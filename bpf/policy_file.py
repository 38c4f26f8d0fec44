"""A NodePolicy from a local file: for nodes without a control plane, and for tests.

The file is YAML with the names of ``policy.proto``, in protobuf's JSON form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import yaml
from google.protobuf import json_format

from bpf.node_errors import PolicyFileError
from modalmesh.base.errors import Where
from xds.pb.bpf import policy_pb2

__all__ = ["read"]

_LARGEST: Final = 64 << 20


def read(path: Path) -> bytes:
    """Return the serialised NodePolicy in a file.

    Raises:
        PolicyFileError: It can't be read, or holds no NodePolicy; names the line where YAML says it.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise PolicyFileError(f"larger than {_LARGEST >> 20} MiB", where=Where(str(path)))
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyFileError(f"can't be read: {error.strerror}", where=Where(str(path))) from error
    except UnicodeDecodeError as error:
        raise PolicyFileError("is not UTF-8", where=Where(str(path))) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 0
        problem = getattr(error, "problem", None) or "is no YAML"
        raise PolicyFileError(str(problem), where=Where(str(path), line)) from error
    try:
        message = json_format.ParseDict(values or {}, policy_pb2.NodePolicy())
    except (json_format.ParseError, TypeError, ValueError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise PolicyFileError(
            f"is no NodePolicy: {reason}", hint="fields are those of bpf/policy.proto", where=Where(str(path))
        ) from error
    return message.SerializeToString()
