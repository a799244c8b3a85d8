"""What holds for every test: one thread computes in each process, and no example has a deadline.

The thread is set before torch is imported. The models are tiny, and two test files run side by
side: more threads would only wait for one another, spinning. `test_instruction_sets` asks for two.
Hypothesis would fail an example that takes more than 200 ms, which on a busy machine says nothing.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

settings.register_profile("droidspeak", deadline=None)
settings.load_profile("droidspeak")
