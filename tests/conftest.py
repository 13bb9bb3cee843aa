"""What all tests share."""

import os

# Tests share the cores with the processes that they start: threads of torch that spin for work
# starve the others. Read when torch is loaded, so nothing that loads it is imported above.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
