"""Builds ``xds/pb`` before the wheel is packed; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from tools import protos


class BuildWithMessages(build_py):
    """``build_py`` that generates the protobuf modules first."""

    def run(self) -> None:
        """Generate in place, so that an editable install sees the modules too."""
        protos.generate()
        super().run()


setup(cmdclass={"build_py": BuildWithMessages})
