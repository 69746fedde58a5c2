"""log_names: what the names of log files in HOME/logs say: <process>.log, and <gateway>-access.log."""

from __future__ import annotations

ACCESS_SUFFIX = "-access"  # of the access log of a gateway
