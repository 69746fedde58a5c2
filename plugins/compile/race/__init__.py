"""The race of compiled candidates: what is measured, how it is judged, and who wins. Pure; workers.race measures."""
