"""Learning from preferences: pairs of answers to one prompt, one of which is preferred. Importing this package imports no torch."""
