"""Builds ``xds/pb`` and the kernel programs before the wheel is packed; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent))
from bpf import build as programs
from tools import protos


class BuildGenerated(build_py):
    """``build_py`` that makes first what is not in git."""

    def run(self) -> None:
        """Build in place, so that an editable install sees the results too."""
        protos.generate()
        programs.build_package()
        super().run()


setup(cmdclass={"build_py": BuildGenerated})
