"""The run loop: the staged build, the step, evaluation, and what a run leaves behind. Nothing is imported here: configs must stay torch-free."""
