"""What the mesh should be: documents in, a validated ``Mesh`` in the middle, compiled xDS resources out."""
