"""Intarsia: pre-training and post-training of generative models from a small core and many plugins."""

__version__ = "0.1.0.dev0"
# The plugin-API version of this core; plugins written for PLUGIN_API and PLUGIN_API - 1 are accepted.
PLUGIN_API = 1
