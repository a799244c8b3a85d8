"""What holds for every test: one thread computes in each process.

Before torch is imported. The models are tiny, and two test files run side by side: more threads
would only wait for one another, spinning. `test_instruction_sets` asks for two.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
