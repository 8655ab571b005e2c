"""A bar on a terminal, plain lines elsewhere."""

import io

from rich.console import Console

from recipes.run.progress import Reporter, Stopwatch


def report(terminal: bool, unit: str = "tokens") -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=120)
    with Reporter(100, 10, 512, console, unit) as reporter:
        reporter.advance(20)
        reporter.report(20, 2.34567, 1024.0)
        reporter.say("step 20  validation [bold] loss")
    return output.getvalue()


def test_lines() -> None:
    assert report(terminal=False) == (
        "step 20/100  loss 2.3457  1,024 tokens/s  0:00:40 left\nstep 20  validation [bold] loss\n"
    )


def test_another_unit() -> None:
    assert "1,024 images/s" in report(terminal=False, unit="images")
    assert "1,024 images/s" in report(terminal=True, unit="images")


def test_bar() -> None:
    shown = report(terminal=True)
    for part in ("20/100", "loss 2.3457", "1,024 tokens/s", "left", "validation [bold] loss"):
        assert part in shown


def test_resumed_right_before_a_log_line() -> None:
    """The first step of a session starts the clock: nothing is known of its speed."""
    output, clock = io.StringIO(), Stopwatch(9)
    clock.restart(10)
    speed = clock.speed(10, 512)
    assert speed is None
    with Reporter(100, 9, 512, Console(file=output)) as reporter:
        reporter.advance(10)
        reporter.report(10, 2.34567, speed)
    assert output.getvalue() == "step 10/100  loss 2.3457\n"
    clock.restart(10)
    with clock.paused():
        pass
    assert clock.speed(11, 512) > 0
