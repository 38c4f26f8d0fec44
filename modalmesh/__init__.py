"""ModalMesh: a sidecar-less service mesh for multimodal GPU inference."""
