"""Core's own plugin: it offers nothing, and is loaded through the same door as everybody else's."""

INTARSIA_API = 1
