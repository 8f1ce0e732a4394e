"""What runs in the sandbox's own processes. Standard library alone: the interpreter is started without site packages, and imports nothing that the parent has."""
