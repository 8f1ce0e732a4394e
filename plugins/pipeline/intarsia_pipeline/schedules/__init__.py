"""The schedules of this distribution. Torch-free."""
