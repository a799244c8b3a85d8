"""Progress in a terminal, and without a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from sglang_droidspeak.demo.run import step


def test_without_a_terminal_it_prints_lines_and_no_control_characters():
    out = io.StringIO()
    with step(Console(file=out, force_terminal=False), "Answer", 2) as advance:
        advance()
        advance()
    first, last = out.getvalue().splitlines()
    assert first == "Answer ..."
    assert last.startswith("Answer: done in")


def test_a_failed_step_is_not_done():
    out = io.StringIO()
    try:
        with step(Console(file=out, force_terminal=False), "Start"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert "done" not in out.getvalue()


def test_on_a_terminal_it_draws_a_bar():
    out = io.StringIO()
    with step(Console(file=out, force_terminal=True, width=120), "Answer", 2) as advance:
        advance()
        advance()
    assert "2/2" in out.getvalue()
    assert "━" in out.getvalue()
