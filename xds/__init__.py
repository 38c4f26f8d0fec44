"""How configuration travels: snapshots in, acknowledged xDS resources out; see README.md."""
