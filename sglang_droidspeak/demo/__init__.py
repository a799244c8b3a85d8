"""`droidspeak demo`: two real servers share prefixes, and what it costs and saves is measured.

config ─► rig (two servers) ─► measure ─► results, checks ─► report, picture
"""

from sglang_droidspeak.demo.command import run_demo
from sglang_droidspeak.demo.config import DemoConfig, RandomPair

__all__ = ["DemoConfig", "RandomPair", "run_demo"]
