"""Counts the entries of the table that obey the law: a test checks several at once."""

import pytest

from .law import ASKED, HELD


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    found = [pair for report in reports for pair in report.user_properties]
    asked, held = (sum(int(n) for key, n in found if key == name) for name in (ASKED, HELD))
    if asked:
        terminalreporter.write_line(
            f"value and gradient: {held} of {asked} functions equal the plain ones at every scale"
        )
