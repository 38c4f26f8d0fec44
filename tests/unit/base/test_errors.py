"""Every error has a code of its own and says what, where and what to do."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter

import bpf
import controlplane
import modalmesh.launcher
import router
import xds
from modalmesh.base.errors import DocumentError, ModalMeshError, Where


def test_the_message() -> None:
    error = DocumentError("no such host", hint="name a service", where=Where("a.yaml", 7))
    assert str(error) == "a.yaml:7: no such host; name a service [MM1200]"
    assert str(DocumentError("broken", where=Where("a.yaml"))) == "a.yaml: broken [MM1200]"


def test_codes_are_distinct() -> None:
    for package in (bpf, controlplane, modalmesh.launcher, router, xds):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if ".pb" not in module.name:
                importlib.import_module(module.name)
    found: list[type[ModalMeshError]] = [ModalMeshError]
    for kind in found:
        found += kind.__subclasses__()
    codes = Counter(kind.code for kind in set(found))
    assert len(codes) > 10
    assert {code for code, times in codes.items() if times > 1} == set()
