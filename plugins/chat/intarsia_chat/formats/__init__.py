"""Ways to write tools and their calls as text."""
