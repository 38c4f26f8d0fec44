"""Logs are one JSON object a line off a terminal, and never hold a secret."""

from __future__ import annotations

import io
import json

import pytest

from modalmesh.base import logging
from modalmesh.base.settings import Log


def test_json_with_masked_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    logging.configure(Log(format="auto"), "test")
    logging.get_logger().info("hello", api_key="abc", Authorization="Bearer abc", name="ünï")
    entry = json.loads(capsys.readouterr().err)
    assert entry["event"] == "hello"
    assert entry["process"] == "test"
    assert entry["name"] == "ünï"
    assert "abc" not in json.dumps(entry)


def test_the_level_holds(capsys: pytest.CaptureFixture[str]) -> None:
    logging.configure(Log(level="warning"), "test")
    logging.get_logger().info("quiet")
    logging.get_logger().warning("loud")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["loud"]


def test_an_exception_is_part_of_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    logging.configure(Log(), "test")
    try:
        int("broken")
    except ValueError as error:
        logging.get_logger().error("failed", exc_info=error)
    (line,) = capsys.readouterr().err.splitlines()
    assert "ValueError: invalid literal" in json.loads(line)["exception"]


def test_nobody_reading_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

    monkeypatch.setattr("sys.stderr", Broken())
    logging.configure(Log(), "test")
    logging.get_logger().error("is anybody there?")
