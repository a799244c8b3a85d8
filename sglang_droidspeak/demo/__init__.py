"""`droidspeak demo`: two real servers share prefixes, and what it costs and saves is measured.

config ─► run (two servers) ─► results, and what has to hold ─► report, picture
"""

from sglang_droidspeak.demo.config import DemoConfig
from sglang_droidspeak.demo.run import run_demo

__all__ = ["DemoConfig", "run_demo"]
