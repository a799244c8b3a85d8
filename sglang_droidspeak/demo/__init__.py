"""`droidspeak demo`: two real servers share prefixes, and what it costs and saves is measured.

config ─► rig (two servers) ─► results, and what has to hold ─► report, picture
"""

from sglang_droidspeak.demo.command import run_demo
from sglang_droidspeak.demo.config import DemoConfig

__all__ = ["DemoConfig", "run_demo"]
