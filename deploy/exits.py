"""Exit codes of a service, and which of them a restart cannot mend."""

from __future__ import annotations

OK_EXIT = 0
ERROR_EXIT = 1
CONFIG_EXIT = 2
FENCED_EXIT = 3
NOT_DONE_EXIT = 4
"""An order was taken, and was not followed by all in the time that was given."""
REFUSED_EXIT = 5
"""The control plane refuses an order or a question, and says why."""
INTERRUPTED_EXIT = 130
HOPELESS = frozenset({CONFIG_EXIT, FENCED_EXIT})
"""A wrong configuration stays wrong, and a trainer that was replaced must not take the run back."""
