"""`droidspeak demo`: two real servers share prefixes, and what it costs and saves is measured.

conditions ─► documents ─► rig (two servers) ─► measure ─► results, checks ─► report (table, PNG, JSON)
"""

from sglang_droidspeak.demo.command import DemoConfig, run_demo
from sglang_droidspeak.demo.rig import DemoFailed

__all__ = ["DemoConfig", "DemoFailed", "run_demo"]
