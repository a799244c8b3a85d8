"""`droidspeak demo`: two real servers share prefixes, and the demo measures cost and savings.

config ─► run (two servers) ─► results, and their checks ─► report, picture
"""

from sglang_droidspeak.demo.config import DemoConfig
from sglang_droidspeak.demo.run import run_demo

__all__ = ["DemoConfig", "run_demo"]
