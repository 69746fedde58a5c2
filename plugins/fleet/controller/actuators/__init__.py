"""What carries decisions out where the local supervisor does not. Others follow the metrics or the admin API."""
