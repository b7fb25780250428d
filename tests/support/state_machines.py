"""How long the random lives of state machines are: two hundred in `make test`, two thousand in `make test-slow`."""

from hypothesis import settings

SHORT = settings(max_examples=200, stateful_step_count=50, deadline=None)
LONG = settings(SHORT, max_examples=2000)
LONG_S = 900  # for pytest's time limit: one takes about 20 s on a machine that does nothing else
