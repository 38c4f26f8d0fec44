"""What the kernel does for the mesh: programs, their loader, and the node agent that owns them."""
