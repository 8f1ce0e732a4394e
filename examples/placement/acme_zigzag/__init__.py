"""A placement that gives each rank one row block from either end."""
