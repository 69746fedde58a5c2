"""What stands on the core: one folder for each capability, each found by its entry point (`services/plugin`)."""
