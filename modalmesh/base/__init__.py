"""What every package stands on: errors, settings, logging, metrics, and nothing else.

Nothing here knows of the mesh. Import the modules, not this package.
"""
