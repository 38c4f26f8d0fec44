"""Makes ``xds/pb`` and the kernel programs before packages are looked for; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent))
from bpf import build as programs
from tools import protos

protos.generate()
programs.build_package()
setup()
