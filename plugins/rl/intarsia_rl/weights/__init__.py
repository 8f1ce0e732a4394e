"""Weights from the trainer to generators: what is published, how it travels, how a generator takes it. See `docs/explanation/weight-push.md`."""
